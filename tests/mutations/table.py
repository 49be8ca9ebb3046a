"""What can be switched off (tests/mutations/mutations), by name:
    off       what it is, for people
    changes   [(file, text that is there once, text instead)]
    sources   what is compiled with that; else these files
    artefact  what is linked, as ninja calls it
    program   the part of program.sh that runs with that client library; else the artefact itself is a test, and
    cases     its arguments
    red       what the failing test says
"""
CLIENT = "lib/gpupool/libcuda.so.1"
RESULT = r"FAILED .*: the result: "
RETURNS = r"no answer: |FAILED a session comes back to shared memory"

ROWS = {
    # ---- replay (client/call_log.h, client/replay.h)
    "payloads": {
        "off": "the log keeps the bytes of copies to the GPUs",
        "changes": [("client/call_log.cpp",
                     "  }\n  add(entry);\n}\n\nvoid CallLog::got(",
                     "  }\n  std::ranges::fill(entry.bytes, std::byte{});\n  add(entry);\n}\n\nvoid CallLog::got(")],
        "artefact": CLIENT, "program": "uploads", "red": RESULT},
    "answers": {
        "off": "answers of a replay are compared with what the program has seen",
        "changes": [("client/replay.cpp", "  const bool polls = (call.traits & CallLog::kPolls) != 0;\n",
                     "  return;\n  const bool polls = (call.traits & CallLog::kPolls) != 0;\n")],
        "artefact": CLIENT, "program": "clock", "red": RESULT},
    "order": {
        "off": "the log records what the program had seen before it made a call",
        "changes": [("client/call_log.cpp", "  seeLandings(word, value);\n  Entry entry;", "  seeLandings(word, value);\n  return;\n  Entry entry;")],
        "artefact": CLIENT, "program": "queries", "red": RESULT},
    "functions": {
        "off": "a host function that has run does not run again",
        "changes": [("client/replay.cpp", "  callbacks_.erase(message);\n", ""),
                    ("client/session_notices.cpp", "  if (known && function.once) {\n", "  if (known && function.once && log_ == nullptr) {\n")],
        "artefact": CLIENT, "program": "functions", "red": RESULT},
    "words": {
        "off": "a completion word never goes back",
        "changes": [("client/words.cpp", "while (known < value && !words_[index]", "while (!words_[index]")],
        "artefact": "bin/client_words_test", "red": "never goes back"},
    # ---- the fence: of two servers that may have a session, one has it
    "fence-life": {
        "off": "a lease leaves the server that its holder has lost, and no later one",
        "changes": [("pool-manager/pool_failovers.cpp", "record.isPlaced() && record.server().life() != lost)", "record.isPlaced() && false)")],
        "artefact": "bin/pool_test", "cases": "'asked again*'", "red": "asked again"},
    "fence-manager": {
        "off": "a server that a lease has left is told so when it comes back",
        "changes": [("pool-manager/pool_failovers.cpp", "  left.role = PlacementRole::left;", "  (void)left;")],
        "artefact": "bin/pool_test", "cases": "'what it has left*'", "red": "what it has left is told so"},
    "fence-holder": {
        "off": "what a server says after the lease has begun to leave it is dropped",
        "changes": [("pool-manager/cli/holder_failover.cpp", "        if (left) *look = {};\n", "")],
        "artefact": "bin/holder_test", "cases": "'what a server says after*'", "red": "has begun to leave it is dropped"},
    # ---- memory of other leases (docs/restorable.md)
    "tenant": {
        "off": "a token opens in leases of its own tenant alone",
        "changes": [("server/front/leases.cpp", "second != nullptr && first->tenant == second->tenant;", "second != nullptr;")],
        "artefact": "bin/lending_test", "cases": "'a token opens*'", "red": "a token opens in other leases of its tenant"},
    "lent": {
        "off": "a lease of which others have memory is not confirmed to have ended",
        "changes": [("server/front/control.cpp", "        return sessions_.givenBack(id);\n", "        return kj::Promise<void>(kj::READY_NOW);\n")],
        "artefact": "bin/lending_test", "cases": "'a revoked lease keeps*'", "red": "a revoked lease keeps its devices"},
    "fence-keeper": {
        "off": "a keeper takes nothing of a session's life before the one as which it was brought",
        "changes": [("schema/checkpoint_keeper.cpp", "coming.kept.epoch < fence->second", "false")],
        "artefact": "bin/holder_test", "cases": "'what a session has left*'", "red": "left behind is not kept"},
    # ---- moves (docs/sessions.md)
    "epoch": {
        "off": "a worker takes frames of its session's epoch alone",
        "changes": [("server/worker/session.cpp", "if (call.frame.epoch != start_.epoch || call.frame.seq != expected)",
                     "if (call.frame.seq != expected)")],
        "artefact": "bin/worker_session_test", "cases": "'*malformed*'", "red": "of another epoch"},
    "placement": {
        "off": "code is loaded by one call at a time",
        "changes": [("server/worker/serve.h", "    if constexpr (R::loads) placing_ = session_.holdPlacing();\n", "")],
        "sources": ["server/worker/calls/module.cpp"],
        "artefact": "bin/worker_session_test", "cases": "'*one call at a time*'", "red": "code is loaded by one call at a time"},
    "host-memory": {
        "off": "another worker of the server takes the session's own pinned memory over",
        "changes": [("server/worker/rebuild.cpp", "const int descriptor = stream_ ? -1 : fcntl(state_->host[i], F_DUPFD_CLOEXEC, 3);",
                     "const int descriptor = -1;"),
                    ("server/worker/rebuild.cpp", "if ((descriptor < 0 && !stream_) ||\n        !session", "if (!session")],
        "artefact": "bin/worker_rebuild_test", "red": "pinned 0"},
    "host-pages": {
        "off": "another worker of the server takes the session's own words and staging memory over",
        "changes": [("server/worker/rebuild.cpp", "    pages->words = transport::SharedMemory::adopt(came[0].release(), schema::kWordsBytes);\n"
                     "    pages->staging = transport::SharedMemory::adopt(came[1].release(), staging);\n", "    (void)staging;\n")],
        "artefact": "bin/worker_rebuild_test", "red": "words 0; staging 0"},
    "ahead": {
        "off": "what has gone ahead of a move stays in the record until the move is over",
        "changes": [("server/worker/record.h", "bool hasGone(const Node& node) const { return node.position <= gone_; }",
                     "bool hasGone(const Node& node) const { return node.position == 0; }")],
        "sources": ["server/worker/record.cpp"],
        "artefact": "bin/worker_books_test", "cases": "'record: what has gone ahead*'", "red": "what has gone ahead"},
    "digests": {
        "off": "tests of moves compare digests of all contents",
        "changes": [("server/worker/rebuild.cpp", "  if (theirs.size() == 0) return \"\";\n  Contents contents;", "  return \"\";\n  Contents contents;")],
        "artefact": "bin/worker_stream_test", "cases": "'stream: where tests compare*'", "red": "where tests compare contents"},
    "leaves-addressed": {
        "off": "what kernels address in shared memory is mirrored when the session leaves that",
        "changes": [("client/memory/host_mirrors.cpp", "    insertMirror(std::move(mirror));\n  }\n  for (auto& noted", "  }\n  for (auto& noted")],
        "artefact": CLIENT, "program": "leaves", "red": RESULT},
    "leaves-noted": {
        "off": "pinned memory that a kernel is given is noted while it is shared",
        "changes": [("client/memory/host_mirrors.cpp", "  addressed_.insert(block->first);\n", "")],
        "artefact": CLIENT, "program": "leaves", "red": RESULT},
    "returns-mirrors": {
        "off": "what kernels have written is in the program's pages when a session comes to shared memory",
        "changes": [("client/session_move.cpp", "    hooks->settle();\n", "    (void)0;\n")],
        "artefact": CLIENT, "program": "returns", "red": RETURNS},
    "returns-registered": {
        "off": "so is what they have written to registered memory",
        "changes": [("client/memory/host.cpp", "  if (lends && !Session::get().mapsMemory() && !fetchTargets(next, why)) return false;\n", "")],
        "artefact": CLIENT, "program": "returns", "red": RETURNS},
    # ---- what sessions share, told to the next life of their server (server/front/offers.h, share_receipts.h)
    "receipts": {
        "off": "a receipt is one only if this server has sealed it",
        "changes": [("server/front/share_receipts.cpp", "  if (!equalConstantTime(receipt.first(kSeal), hmacSha256(key_, text))) return std::nullopt;\n", "")],
        "artefact": "bin/server_offers_test", "cases": "'a receipt says*'", "red": "a receipt says what its server has written"},
    "owners": {
        "off": "a session says only of its own pieces that it offers them",
        "changes": [("server/front/offers.cpp", "      if (piece.first.session == one.session && piece.first.account == one.account)\n", "")],
        "artefact": "bin/server_offers_test", "cases": "'nobody gets another*'", "red": "nobody gets another's piece"},
}
