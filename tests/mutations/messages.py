"""Mutations of weights that move in messages, where not all ranks have memory in common, and of how such ranks meet."""

from mutation import Edit, Mutation

MESSAGES = "python/tokenway/balance/messages.py"
COPIES = "python/tokenway/balance/copies.py"
WEIGHTS = "python/tokenway/balance/weights.py"
REPLICAS = "python/tokenway/balance/replicas.py"
MEET = "src/core/meet.cc"
MOVED = "py/test_messages"
BETWEEN = "py/test_moves_between_hosts"

MESSAGES_MUTATIONS = (
    Mutation(
        "an answer that breaks off is whole",
        "M1",
        MOVED,
        "test_half_an_answer",
        (Edit(MESSAGES, '            raise ConnectionError("the connection is closed")\n', "            return\n"),),
    ),
    Mutation(
        "what a peer sends late is taken for the next answer",
        "M1",
        MOVED,
        "test_a_peer_that_brings_nothing",
        (Edit(MESSAGES, "            self._forget(known.pop(rank, None))\n", ""),),
    ),
    Mutation(
        "a peer may take its time",
        "S6",
        MOVED,
        "test_a_peer_that_brings_nothing",
        (
            Edit(
                MESSAGES,
                "            connection.settimeout(self._limit)\n",
                "            connection.settimeout(10 * _GREETING)\n",
            ),
        ),
    ),
    Mutation(
        "a balancer's end waits for a peer",
        "M8",
        MOVED,
        "test_a_peer_that_is_stopped_and_dies",
        (
            Edit(
                COPIES,
                "            self._messages.cut()  # again, as a call may have connected since\n",
                "            pass\n",
            ),
        ),
    ),
    Mutation(
        "whoever connects is served",
        "weights go to the ranks of the group",
        MOVED,
        "test_strangers_get_nothing",
        (Edit(MESSAGES, "if not hmac.compare_digest(key, self._key):", "if not key:"),),
    ),
    Mutation(
        "what lies behind the weights is served",
        "weights go to the ranks of the group",
        MOVED,
        "test_what_is_not_there_is_refused",
        (Edit(MESSAGES, "elif 0 <= at <= at + size <= self._memory.size:", "elif size >= 0:"),),
    ),
    Mutation(
        "a plan that was told before one follows is lost",
        "ranks follow one plan",
        MOVED,
        "test_boards",
        (Edit(MESSAGES, "        seen = 0\n", "        seen = self._turn\n"),),
    ),
    Mutation(
        "what comes to a device does not wait for its steps",
        "M4",
        MOVED,
        "test_a_devices_memory",
        (Edit(MESSAGES, "            self._stream.wait_event(stream.record_event())\n", "            pass\n"),),
    ),
    Mutation(
        "ranks with unlike weights go on",
        "M1",
        MOVED,
        "test_ranks_that_differ",
        (Edit(MESSAGES, "        if card[3] != cards[me][3]:\n", "        if not card[3]:\n"),),
    ),
    Mutation(
        "peers of other hosts are told localhost",
        "weights go to the ranks of the group",
        "meet_test",
        "Meet.RanksOfOtherHostsAreToldNoLocalhost",
        (
            Edit(
                "src/bootstrap/gather.cc",
                '    if (!own.empty() && own != theirs && own != kLocalhost && own != "::1") return own;\n',
                "    if (!own.empty()) return own;\n",
            ),
        ),
    ),
    Mutation(
        "who comes late goes on with what others have given up",
        "an occasion is used up by all",
        "meet_test",
        "Meet.WhoComesLateHearsThatTheOthersHaveGivenUp",
        (
            Edit(
                MEET,
                "return agree(bootstrap, group.members, tags + kHave, deadline(), kMeeting, {});",
                "return met;",
            ),
        ),
    ),
    Mutation(
        "a rank that gives up a meeting tells nobody",
        "S6",
        "meet_test",
        "Meet.WhoComesLateHearsThatTheOthersHaveGivenUp",
        (Edit(MEET, "  bootstrap.give(group.members, tags + kHave, pack_result(met).take());", "  "),),
    ),
    Mutation(
        "a meeting waits for a rank that has given the group up",
        "S6",
        "meet_test",
        "Meet.AGroupThatIsGivenUpHasNoMeetings",
        (Edit(MEET, "return finished() || group.has_left(group.rank_of(member));", "return member < 0;"),),
    ),
    Mutation(
        "who meets in a group has left it for those that shrink",
        "survivors are those that live",
        "lifetime_test",
        "Meetings/Lifetime.ShrinkingWhileMoreMeet/*",
        (Edit("src/core/shrink.cc", " && made.call != Call::kMeet;", ";"),),
    ),
    Mutation(
        "ranks meet that give unlike numbers of bytes",
        "S10",
        "meet_test",
        "Meet.RanksGiveAsMuch",
        (Edit(MEET, "if (given[rank].size() == given[0].size()) continue;", "if (rank > 0) continue;"),),
    ),
    Mutation(
        "a rank of another host is not asked for its weights",
        "ranks follow one plan",
        BETWEEN,
        "test_between_hosts_experts_move",
        (Edit(WEIGHTS, "            if self.messages is None:\n                raise\n", "            raise\n"),),
    ),
    Mutation(
        "a rank of the same host is asked for what lies in memory",
        "weights of a host are read in memory",
        BETWEEN,
        "test_between_hosts_experts_move",
        (
            Edit(
                WEIGHTS,
                "            self._pull(*piece, stream)\n",
                "            if self.messages is not None:\n"
                '                raise Unsupported("asked")\n'
                "            self._pull(*piece, stream)\n",
            ),
        ),
    ),
    Mutation(
        "experts are trained whose gradients nobody can sum",
        "a call that is not possible is refused",
        "py/test_training_plans",
        "test_between_hosts",
        (Edit(REPLICAS, "        if weights.messages is not None:", "        if weights.messages is weights:"),),
    ),
)
