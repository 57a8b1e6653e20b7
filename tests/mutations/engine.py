"""Mutations of the engine between hosts: order, bounds, sources, and peers that are gone or strangers."""

from mutation import Edit, Mutation

QUEUE = "src/net/peer_queue.cc"
ENGINE = "src/net/fabric_engine.cc"
CONNECT = "src/net/connect.cc"
WINDOWS = "src/net/windows.h"

ENGINE_MUTATIONS = (
    Mutation(
        "a word between hosts overtakes its rows",
        "S4",
        "fabric_test",
        "Fabric.WordsWaitForWritesWhereMessagesOvertakeThem",
        (Edit(QUEUE, "!outlet.endpoint->ordered() && writes_flying_ > 0", "false"),),
    ),
    Mutation(
        "a write between hosts ends before it is delivered",
        "S4",
        "fabric_test",
        "Fabric.WordsWaitForWritesWhereMessagesOvertakeThem",
        (Edit(QUEUE, "!outlet.endpoint->ordered(), &operation->context", "false, &operation->context"),),
    ),
    Mutation(
        "a put between hosts is done while pieces of it are under way",
        "S4",
        "engine_test",
        "*ASourceIsFreeWhenItsPutIsDone/scripted",
        (Edit(QUEUE, "next_ > 0 && items_.front().flying == 0", "next_ > 0"),),
    ),
    Mutation(
        "a peer may have any number of operations",
        "S7",
        "engine_test",
        "*NoMoreIsTakenThanThereIsRoomFor/scripted",
        (Edit(ENGINE, "static_cast<uint64_t>(options_.depth)) return", "UINT64_MAX) return"),),
    ),
    Mutation(
        "patience with a peer that is stuck has no end",
        "S6",
        "fabric_test",
        "Fabric.APeerThatIsStuckFailsAndKeepsNobody",
        (Edit(ENGINE, "if (queue.stands(now, options_.patience)) {", "if (false) {"),),
    ),
    Mutation(
        "an engine forgets a peer's operation that failed",
        "S6",
        "engine_test",
        "*OfAPeerThatIsGoneHaveARecord/scripted",
        (
            Edit(QUEUE, "if (sent == Sent::kFailed) {", "if (sent == Sent::kFailed) return any;\n    if (false) {"),
            Edit(ENGINE, "if (ended.error != 0) {", "if (false) {"),
            Edit(ENGINE, "if (!bootstrap_.alive(queue.rank()))", "if (false)"),
        ),
    ),
    Mutation(
        "messages of strangers are taken for peers'",
        "S4",
        "fabric_test",
        "Fabric.MessagesOfStrangersAreDropped",
        (Edit(ENGINE, "note.secret != secret_ || ", ""),),
    ),
    Mutation(
        "a put may go beyond the peer's window",
        "S4",
        "engine_test",
        "*WhatIsNowhereIsRefused/pretended",
        (Edit(WINDOWS, "offset <= room && bytes <= room - offset", "offset + bytes <= room"),),
    ),
    Mutation(
        "an engine ends while peers' puts are under way",
        "S6",
        "fabric_test",
        "Fabric.TheEndComesBehindWhatIsUnderWay",
        (Edit(CONNECT, "return !peer.left || !peer.queue->idle(); }", "return !peer.queue->idle(); }"),),
    ),
    Mutation(
        "a rank that cannot reach another lets the others wait",
        "S6",
        "fabric_test",
        "Fabric.ARankThatCannotBeReachedFailsAll",
        (Edit(CONNECT, "return unreached();\n}\n\nStatus FabricEngine::a", "return {};\n}\n\nStatus FabricEngine::a"),),
    ),
)
