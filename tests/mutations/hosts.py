"""Mutations of the exchange between hosts: T1 to T11 of docs/PROTOCOL.md, messages, and where they lie."""

from mutation import Edit, Mutation

TRANSPORT = "src/cpu/fabric_transport.cc"
WAITING = "src/cpu/fabric_waiting.cc"
FOLDING = "src/cpu/fabric_folding.cc"
AGENT = "src/cpu/fold_agent.cc"
ASKING = "src/bootstrap/asking.cc"
MESSAGE = "src/cpu/host_message.cc"
MESSAGE_H = "src/cpu/host_message.h"
IN_PLACE = "src/cpu/in_place.h"
MAP = "src/layout/hosts_map.h"
TOPOLOGY = "src/layout/topology.h"

ASKED = "  const std::vector<int64_t> sent = asking_->ask(now + Asking::kPatience, over);\n"
BLOCK_AND_WORD = """  post(peer,
       {{words_.number, staged},
        {words_.number, hosts_map_.block(at_.channel, at_.bank(), list)},
        sizeof block + sizeof(Block::Entry) * entries},
       &word);
"""
WORD = "  post(peer, {{words_.number, 0}, {words_.number, 0}, 0}, &word);\n"


def _between(name: str, invariant: str, test: str, *edits: Edit) -> Mutation:
    return Mutation(name, invariant, "between_hosts_test", f"BetweenHosts.{test}", edits)


def _fault(name: str, invariant: str, test: str, *edits: Edit) -> Mutation:
    return Mutation(name, invariant, "hosts_faults_test", test, edits)


def _map(name: str, invariant: str, test: str, *edits: Edit) -> Mutation:
    return Mutation(name, invariant, "hosts_map_test", f"HostsMap.{test}", edits)


def _message(name: str, invariant: str, test: str, *edits: Edit) -> Mutation:
    return Mutation(name, invariant, "host_message_test", f"HostMessage.{test}", edits)


def _partials(name: str, invariant: str, test: str, *edits: Edit) -> Mutation:
    return Mutation(name, invariant, "hosts_partials_test", f"BetweenHosts.{test}", edits)


def _in_place(name: str, invariant: str, test: str, *edits: Edit) -> Mutation:
    return Mutation(name, invariant, "in_place_test", f"InPlace.{test}", edits)


HOSTS = (
    _fault(
        "the word to a host is posted before the rest of the rows",
        "T5",
        "BetweenHosts.WordsComeLast",
        Edit(TRANSPORT, "ship(host, messages_[host].finish(), true);", "messages_[host].finish();"),
        Edit(
            TRANSPORT,
            BLOCK_AND_WORD,
            BLOCK_AND_WORD + "  if (area_ != Area::kStraight) ship(host, messages_[host].bytes(), true);\n",
        ),
    ),
    _fault(
        "the block comes behind its word",
        "T8",
        "BetweenHosts.WordsComeLast",
        Edit(TRANSPORT, BLOCK_AND_WORD, WORD + BLOCK_AND_WORD.replace("entries},\n       &word);", "entries});")),
    ),
    _fault(
        "a refused step has no word between hosts",
        "T5",
        "BetweenHosts.RefusedStepsAreTold",
        Edit(
            TRANSPORT,
            "  const int peer = topology_.rail_peer(me_, host);\n  const int list = topology_.list(me_, host);\n"
            "  const auto entries",
            "  if (signal.mode == Mode::kRefused) return;\n"
            "  const int peer = topology_.rail_peer(me_, host);\n  const int list = topology_.list(me_, host);\n"
            "  const auto entries",
        ),
    ),
    _between(
        "a latch is shared between banks",
        "T6",
        "LostRank",
        Edit(TRANSPORT, "words_told_[index(at_, host, topology_.hosts())]", "words_told_[host]"),
    ),
    _between(
        "a latch is shared between hosts",
        "T6",
        "LostRank",
        Edit(TRANSPORT, "words_told_[index(at_, host, topology_.hosts())]", "words_told_[index(at_, 0, 1)]"),
    ),
    _between(
        "a word that was added twice is taken for its step",
        "T6",
        "DoubledWord",
        Edit(TRANSPORT, "  if (told.step != at.step) return store(told, 0);\n", ""),
        Edit(TRANSPORT, "store({told.step, told.mode, good", "store({at.step, told.mode, good"),
    ),
    _fault(
        "rows that go straight are not waited for",
        "T2",
        "BetweenHosts.LostRowsWord",
        Edit(TRANSPORT, "if (rows != entry.rows_word) {", "if (false) {"),
    ),
    _between(
        "a row goes to a host once for each of its ranks",
        "0067",
        "EachRowCrossesOnce",
        Edit(TRANSPORT, "message_to(peer).put_row(", "message_to(peer).put("),
    ),
    _between(
        "every record is a chunk",
        "T7",
        "EachRowCrossesOnce",
        Edit(TRANSPORT, "bytes < std::max(kChunk, message_room() / kMostChunks)", "bytes < 1"),
    ),
    _between(
        "the owner of a word that is missing is blamed without asking",
        "T9",
        "WhoHasSentTheLeastIsBlamed",
        Edit(WAITING, ASKED, f"{ASKED}  if (!over()) return {{Wake::kLate, peer}};\n"),
    ),
    _between(
        "what ranks have sent is not compared",
        "T9",
        "WhoHasSentTheLeastIsBlamed",
        Edit(WAITING, "    if (sent[rank] < sent[least]) least = rank;\n", ""),
    ),
    _fault(
        "nobody looks for a dead rank through whom words come",
        "T9",
        "BetweenHosts.DeadRailPeer",
        Edit(WAITING, "inbound_[source].mate == rank && !is_here(source, at)", "false"),
    ),
    _fault(
        "ranks of other hosts are not told of an abort",
        "S6",
        "BetweenHosts.GivenUp",
        Edit(WAITING, "      bootstrap_->post(members_[peer], tag_ + kAbortPost, bytes);\n", ""),
    ),
    _fault(
        "an answer to an older question is taken",
        "T9",
        "Asking.AnswersAreToTheQuestion",
        Edit(ASKING, " && answer.question == question", ""),
    ),
    _between(
        "an agent folds before its mates have sent",
        "S4",
        "FoldsTravelOnce",
        Edit(FOLDING, "while (!has_signal(mate, at)) {", "while (false) {"),
    ),
    _between(
        "folds take what an earlier step has left",
        "folds",
        "FoldsBehindARefusal",
        Edit(AGENT, "tag.place == 0 || tag.step != at.step", "tag.place == 0"),
    ),
    _between(
        "a folding rank without folds adds nothing",
        "T5",
        "FoldsOfNothing",
        Edit(
            FOLDING,
            "  const uint64_t bytes = message.finish();\n",
            "  const uint64_t bytes = message.finish();\n  if (bytes == 0) return;\n",
        ),
    ),
    _partials(
        "partials of other hosts are copied first",
        "0067",
        "PartialsAreReadWhereTheyCame",
        Edit(TRANSPORT, "const uint64_t stays = partials.take(offset, data, n);", "const uint64_t stays = 0;"),
    ),
    _partials(
        "rows of a dispatch stay where they came",
        "T3",
        "DispatchesInTheBankOfACombine",
        Edit(TRANSPORT, "    partials.end();\n", ""),
    ),
    _in_place(
        "a place has the row of an earlier step",
        "T3",
        "EachStepBeginsAnew",
        Edit(IN_PLACE, "rows_.assign(", "rows_.resize("),
    ),
    _in_place(
        "half a row stays where it came",
        "0067",
        "WhatIsBehindTheInboxIsNotTaken",
        Edit(IN_PLACE, "n - taken >= row_bytes_", "n > taken"),
    ),
    _in_place(
        "what begins within a row stays where it came",
        "0067",
        "OtherPlacesAreNotTaken",
        Edit(IN_PLACE, " || (offset - inbox_) % row_bytes_ != 0", ""),
    ),
    _in_place(
        "a record is one row",
        "0067",
        "RowsThatFollowEachOtherAreOneRecord",
        Edit(IN_PLACE, "data + taken;", "data;"),
    ),
    _map(
        "one bank of inboxes",
        "T3",
        "RegionsDoNotOverlap",
        Edit(
            MAP,
            "return lists_at(channel, bank) + static_cast<uint64_t>(list) * inbox;",
            "return lists_at(channel, 0) + static_cast<uint64_t>(list) * inbox;",
        ),
    ),
    _map(
        "one bank of staging",
        "T3",
        "RegionsDoNotOverlap",
        Edit(MAP, "return inbox_at(channel, bank, lists) + (in_bank", "return inbox_at(channel, 0, lists) + (in_bank"),
    ),
    _map(
        "one bank of words and blocks",
        "T3",
        "RegionsDoNotOverlap",
        Edit(MAP, "return words_at(channel, bank) +", "return words_at(channel, 0) +"),
    ),
    _map(
        "sources of one rail peer share an inbox",
        "T3",
        "GivesEachRemoteRankOneList",
        Edit(TOPOLOGY, "rail_peer(other, of_host) == peer ? 1 : 0;", "false ? 1 : 0;"),
    ),
    _map(
        "a rail is a rank's number",
        "0065",
        "GivesEachRemoteRankOneList",
        Edit(
            TOPOLOGY,
            "ranks[of_host][rail[rank] % ranks[of_host].size()]",
            "ranks[of_host][rank % ranks[of_host].size()]",
        ),
    ),
    _message(
        "what may still grow is on its way",
        "T5",
        "BringsWhatWasPut",
        Edit(MESSAGE_H, "uint64_t sealed() const { return last_; }", "uint64_t sealed() const { return end_; }"),
    ),
    _message(
        "rows that follow each other at one target are one record",
        "0067",
        "BringsWhatWasPut",
        Edit(
            MESSAGE,
            "    if (before + record.bytes != targets[i]) return false;\n",
            "    return before + record.bytes == targets[i];\n",
        ),
    ),
    _message(
        "the bytes of put may change before they are copied",
        "T4",
        "BringsWhatWasPut",
        Edit(
            MESSAGE,
            "  append(source, n, &to, 1);\n",
            "  put_row(rail, to & ((uint64_t{1} << Record::kOffsetBits) - 1), source, n);\n",
        ),
    ),
    _message(
        "a row is in a message once for each rank",
        "0067",
        "HasARowOnceForAllWhoGetIt",
        Edit(MESSAGE, "if (row.source != source || row.bytes != n) continue;", "continue;"),
    ),
    _message(
        "a message has no end",
        "T11",
        "WritesNothingBeyondItsRoom",
        Edit(MESSAGE, "if (needed > room_) {", "if (false) {"),
    ),
    _message(
        "a record may lie beyond the window",
        "0067",
        "RefusesWhatIsNone",
        Edit(MESSAGE_H, "      if (offset > window_bytes || record.bytes > window_bytes - offset) return false;\n", ""),
    ),
    _message(
        "a record may end beyond its message",
        "0067",
        "RefusesWhatIsNone",
        Edit(MESSAGE_H, "bytes - at < head || bytes - at - head < record.bytes", "bytes - at < head"),
    ),
)
