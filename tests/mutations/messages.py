"""Mutations of weights that move in messages, where ranks have no memory in common."""

from mutation import Edit, Mutation

MESSAGES = "python/tokenway/balance/messages.py"
COPIES = "python/tokenway/balance/copies.py"
MOVED = "py/test_messages"

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
)
