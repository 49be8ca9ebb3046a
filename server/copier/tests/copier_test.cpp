// Pieces out and in again, through real links and connections.
#include "support.h"

#include <csignal>

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

std::string takeAll(CopierLink& link, Memory& memory) {
  if (std::string why = link.reserve(memory.pieces()); !why.empty()) return why;
  return link.takeOut(exporting(memory), releasing(memory));
}

}  // namespace

TEST_CASE("pieces of two devices come back bit for bit, also a second time") {
  for (const bool verify : {false, true}) {
    TestCopier copier(uint64_t{1} << 30, verify);
    Memory memory(manyPieces(150));
    memory.createAll();
    memory.fill(1);
    {
      auto link = linkTo(copier.connect());
      REQUIRE(takeAll(link, memory).empty());
      for (size_t i = 0; i < memory.pieces().size(); ++i) CHECK(!memory.there(i));
      for (int time = 0; time < 2; ++time) {
        memory.createAll();
        CHECK(memory.wrong(1) == 150);
        REQUIRE(link.bringIn(exporting(memory)).empty());
        CHECK(memory.wrong(1) == 0);
        for (size_t i = 0; i < memory.pieces().size(); ++i) memory.release(i);
      }
      CHECK(!link.lost());
      CHECK(contains(link.reserve(memory.pieces()), "already"));
      CHECK(contains(link.takeOut(exporting(memory), releasing(memory)), "already"));
      uint64_t bytes = 0;
      for (const auto& piece : memory.pieces()) bytes += piece.bytes;
      CHECK(copier.store().usage().memory == bytes);
    }
    CHECK(eventually([&] { return copier.idle(); }));
  }
}

TEST_CASE("a piece larger than a slab, and sessions that keep theirs apart") {
  TestCopier copier;
  Memory first({{0, 40 * kMiB}, {1, 2 * kMiB}}), second({{1, 36 * kMiB}, {0, 6 * kMiB}});
  first.createAll();
  second.createAll();
  first.fill(1);
  second.fill(2);
  auto one = linkTo(copier.connect());
  std::optional<CopierLink> two(linkTo(copier.connect()));
  REQUIRE(takeAll(*two, second).empty());
  REQUIRE(takeAll(one, first).empty());
  two.reset();
  CHECK(eventually([&] { return copier.open() == 1; }));
  Memory third({{0, 42 * kMiB}});  // where the second was
  third.createAll();
  third.fill(3);
  auto three = linkTo(copier.connect());
  REQUIRE(takeAll(three, third).empty());
  first.createAll();
  third.createAll();
  REQUIRE(one.bringIn(exporting(first)).empty());
  REQUIRE(three.bringIn(exporting(third)).empty());
  CHECK(first.wrong(1) == 0);
  CHECK(third.wrong(3) == 0);
  CHECK(copier.store().usage().slabs == 96 * kMiB);
}

TEST_CASE("a budget is shared, and given back when a session ends") {
  TestCopier copier(40 * kMiB);
  Memory large({{0, 30 * kMiB}}), small({{0, 10 * kMiB}}), tiny({{1, 2 * kMiB}});
  auto one = linkTo(copier.connect());
  std::optional<CopierLink> two(linkTo(copier.connect()));
  REQUIRE(two->reserve(large.pieces()).empty());
  REQUIRE(one.reserve(small.pieces()).empty());
  auto three = linkTo(copier.connect());
  const std::string why = three.reserve(tiny.pieces());
  INFO(why);
  CHECK(contains(why, "0.04 GiB of 0.04 GiB are used"));
  CHECK(contains(why, "suspend_memory"));
  bool asked = false;
  CHECK(three.takeOut([&](size_t) { return asked = true, -1; }, [](size_t) {}) == "no room was reserved");
  CHECK(!asked);
  two.reset();
  CHECK(eventually([&] { return copier.store().usage().memory == 10 * kMiB; }));
  auto four = linkTo(copier.connect());
  CHECK(four.reserve(large.pieces()).empty());
}

TEST_CASE("what is beyond the budget lies in a file without a name") {
  Folder folder;
  TestCopier copier({20 * kMiB, folder.path, 0, nullptr, nullptr}, true);
  Memory memory(manyPieces(12));
  memory.createAll();
  memory.fill(4);
  {
    auto link = linkTo(copier.connect());
    REQUIRE(takeAll(link, memory).empty());
    CHECK(copier.store().usage().memory == 20 * kMiB);
    CHECK(copier.store().usage().disk == 12 * kMiB);
    CHECK(folder.empty());
    memory.createAll();
    REQUIRE(link.bringIn(exporting(memory)).empty());
    CHECK(memory.wrong(4) == 0);
  }
  CHECK(eventually([&] { return copier.idle(); }));
}

TEST_CASE("a folder that is not there, and a disk without room, refuse before anything is moved") {
  for (const uint64_t bytes : {uint64_t{2} << 20, kMostPieceBytes}) {
    Folder folder;
    const bool missing = bytes != kMostPieceBytes;
    TestCopier copier({0, missing ? folder.path + "/missing" : folder.path, 0, nullptr, nullptr});
    auto link = linkTo(copier.connect());
    const std::string why = link.reserve(std::vector<CopierPiece>(missing ? 1 : 500, {0, bytes}));
    INFO(why);
    CHECK(contains(why, missing ? "No such file" : "cannot allocate"));
    CHECK(copier.store().usage().disk == 0);
    CHECK(folder.empty());
  }
}

TEST_CASE("a machine without memory refuses, and what was taken of it is given back") {
  int slabs = 2;
  TestCopier copier({uint64_t{1} << 30, {}, 0, [&](uint64_t) { return slabs-- > 0; }, nullptr});
  auto link = linkTo(copier.connect());
  CHECK(contains(link.reserve(std::vector<CopierPiece>{{0, 64 * kMiB}}), "this machine has no"));
  CHECK(copier.store().usage().memory == 0);
  auto other = linkTo(copier.connect());
  CHECK(other.reserve(std::vector<CopierPiece>{{0, 32 * kMiB}}).empty());
}

TEST_CASE("a device that is not there is refused by name") {
  TestCopier copier;
  auto link = linkTo(copier.connect());
  CHECK(contains(link.reserve(std::vector<CopierPiece>{{7, kUnit}}), "no GPU 7"));
}

TEST_CASE("pieces come back to other devices than those that they left, and again to these") {
  TestCopier copier(uint64_t{1} << 30, true);
  Memory memory(manyPieces(20));
  memory.createAll();
  memory.fill(3);
  auto others = memory.pieces();
  for (auto& piece : others) piece.ordinal = 1 - piece.ordinal;
  Memory other(others);
  auto link = linkTo(copier.connect());
  REQUIRE(takeAll(link, memory).empty());
  other.createAll();
  CHECK(contains(link.bringIn(exporting(other), [](size_t) { return 7; }), "no GPU 7"));
  CHECK(link.bringIn(exporting(other), [&](size_t index) { return others[index].ordinal; }).empty());
  CHECK(other.wrong(3) == 0);
  memory.createAll();
  CHECK(link.bringIn(exporting(memory)).empty());
  CHECK(memory.wrong(3) == 0);
}

TEST_CASE("a piece that cannot be exported ends the call; what was taken by then can be brought back") {
  TestCopier copier(uint64_t{1} << 30);
  Memory memory(std::vector<CopierPiece>(200, {0, kUnit}));
  memory.createAll();
  memory.fill(5);
  auto link = linkTo(copier.connect());
  REQUIRE(link.reserve(memory.pieces()).empty());
  const std::string why = link.takeOut(
      [&](size_t index) { return index == 150 ? -1 : memory.exportPiece(index); }, releasing(memory));
  CHECK(contains(why, "cannot be exported"));
  size_t gone = 0;
  for (size_t i = 0; i < 200; ++i) gone += !memory.there(i);
  CHECK(gone == 128);
  size_t asked = 0;
  REQUIRE(link.bringIn([&](size_t index) {
                memory.create(index);
                return ++asked, memory.exportPiece(index);
              })
              .empty());
  CHECK(asked == 128);
  CHECK(memory.wrong(5) == 0);
}

TEST_CASE("pieces go straight to other devices, and the copier keeps nothing") {
  TestCopier copier(2 * kMiB);
  std::vector<CopierPiece> there = manyPieces(150);
  std::vector<CopierCrossing> crossings;
  for (CopierPiece& piece : there) {
    const uint32_t from = piece.ordinal;
    piece.ordinal = 1 - piece.ordinal;
    crossings.push_back({from, piece.ordinal, static_cast<uint32_t>(piece.bytes / kUnit)});
  }
  Memory old(manyPieces(150)), next(there);
  for (Memory* memory : {&old, &next}) memory->createAll();
  old.fill(7);
  next.fill(8);
  {
    auto link = linkTo(copier.connect());
    REQUIRE(link.across(crossings, exporting(old), exporting(next)).empty());
    CHECK(old.wrong(7) == 0);
    CHECK(next.wrong(7) == 0);
    // Beside what the link keeps, and as often as one likes.
    Memory aside({{0, 2 * kMiB}});
    aside.createAll();
    aside.fill(9);
    REQUIRE(takeAll(link, aside).empty());
    old.fill(10);
    CHECK(link.across(crossings, exporting(old), exporting(next)).empty());
    CHECK(next.wrong(10) == 0);
    // What cannot be had is an error, and no end.
    const auto until = [&](size_t last) {
      return [&old, last](size_t index) { return index < last ? old.exportPiece(index) : -1; };
    };
    CHECK(contains(link.across(crossings, until(100), exporting(next)), "cannot be exported"));
    crossings[140].units = 7;
    CHECK(contains(link.across(crossings, exporting(old), exporting(next)), "not as large as was said"));
    crossings[140] = {0, 2, 1};
    CHECK(link.across(crossings, exporting(old), exporting(next)) == "there is no GPU 2");
    aside.createAll();
    REQUIRE(link.bringIn(exporting(aside)).empty());
    CHECK(aside.wrong(9) == 0);
  }
  CHECK(eventually([&] { return copier.idle(); }));
}

TEST_CASE("a connection that is cut gives everything back, whenever that is") {
  const auto refuse = [](size_t) { return -1; };
  for (size_t cut = 0; cut < 8; ++cut) {
    INFO("cut " << cut);
    TestCopier copier(uint64_t{1} << 30);
    Memory memory(manyPieces(140));
    memory.createAll();
    auto socket = copier.connect();
    const int number = socket;
    auto link = linkTo(std::move(socket));
    size_t moved = 0;
    const auto cutAfter = [&](size_t pieces) {
      return [&, pieces](size_t index) {
        if (++moved == pieces) shutdown(number, SHUT_RDWR);
        return memory.exportPiece(index);
      };
    };
    if (cut >= 1) CHECK(link.reserve(memory.pieces()).empty());
    if (cut >= 2 && cut <= 4) {
      CHECK(link.takeOut(cutAfter(cut == 2 ? 1 : cut == 3 ? 65 : 130), [](size_t) {}) != "");
      CHECK(link.takeOut(refuse, [](size_t) {}) != "");
    }
    if (cut >= 5) CHECK(link.takeOut(exporting(memory), [](size_t) {}).empty());
    if (cut >= 6) CHECK(link.bringIn(cutAfter(cut == 6 ? 1 : 100)) != "");
    if (cut < 2 || cut == 5) shutdown(number, SHUT_RDWR);
    CHECK(eventually([&] { return copier.idle(); }));
    CHECK(link.lost());
  }
}

TEST_CASE("a session that ends waits for the copier no longer") {
  auto [mine, theirs] = socketPair();  // one that never answers
  std::atomic<bool> stopping{false};
  auto link = linkTo(std::move(theirs), [&] { return stopping.load(); });
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    stopping = true;
  });
  const std::vector<CopierPiece> pieces{{0, kUnit}};
  CHECK(link.reserve(pieces) == "the session ends");
  later.join();
  // Nor is the room full for ever that nobody empties.
  CHECK(link.bringIn([](size_t) { return -1; }) == "the session ends");
  auto [silent, full] = socketPair();
  auto second = linkTo(std::move(full), [&] { return true; });
  CHECK(second.reserve(std::vector<CopierPiece>(kMostPieces, {0, kUnit})) == "the session ends");
}

TEST_CASE("a copier that answers nonsense is not believed") {
  for (const int kind : {0, 1, 2}) {
    auto [mine, theirs] = socketPair();
    auto link = linkTo(std::move(theirs));
    CopierMessage answer;
    answer.verb = kind == 0 ? CopierVerb::refused : CopierVerb::done;
    answer.sequence = kind == 1 ? 7 : 2;
    answer.count = kind == 2 ? 3 : 0;
    REQUIRE(write(mine, &answer, sizeof answer) == sizeof answer);
    CHECK(link.reserve(std::vector<CopierPiece>{{0, kUnit}}) == "the copier answered nonsense");
  }
}
