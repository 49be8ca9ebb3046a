// The record without a session: what is kept, for how long, and that it stays small.
#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "server/worker/record.h"

#include "catch.h"

using namespace gpupool;
using namespace gpupool::server;
using handles::Kind;
using handles::makeHandle;
using Kept = Record::Deed::Kept;

namespace {

Record::Entry call(uint32_t id, uint64_t context = 0) {
  Record::Entry entry;
  entry.frame.call = id;
  entry.frame.context = context;
  entry.arguments.resize(8);
  return entry;
}

Record::Deed makes(uint64_t object, std::vector<uint64_t> uses = {}) {
  Record::Deed deed;
  deed.subject = object;
  deed.creates = true;
  deed.uses = std::move(uses);
  return deed;
}

Record::Deed ends(uint64_t object) {
  Record::Deed deed;
  deed.subject = object;
  deed.ends = true;
  return deed;
}

Record::Deed sets(uint64_t object, uint64_t key, std::vector<uint64_t> uses = {}, Kept kept = Kept::last) {
  Record::Deed deed;
  deed.subject = object;
  deed.kept = kept;
  deed.key = key;
  deed.uses = std::move(uses);
  return deed;
}

std::vector<uint32_t> calls(const Record& record) {
  std::vector<uint32_t> ids;
  for (const auto& entry : record.entries()) ids.push_back(entry.frame.call);
  return ids;
}

constexpr uint64_t kContextA = makeHandle(Kind::context, 1, 1);
constexpr uint64_t kGraphA = makeHandle(Kind::graph, 1, 1), kGraphB = makeHandle(Kind::graph, 2, 1);
constexpr uint64_t kExecA = makeHandle(Kind::graphExec, 1, 1);
constexpr uint64_t kStreamA = makeHandle(Kind::stream, 1, 1);
constexpr uint64_t kModuleA = makeHandle(Kind::module, 1, 1);

using Calls = std::vector<uint32_t>;

}  // namespace

TEST_CASE("record: an end takes its beginning along, and what was set meanwhile") {
  Record record;
  record.add(call(1), makes(kGraphA));
  record.add(call(2), makes(kStreamA));
  record.add(call(3), sets(kGraphA, 7, {}, Kept::always));
  const size_t bytes = record.bytes();
  record.add(call(4), ends(kGraphA));
  CHECK(calls(record) == Calls{2});
  CHECK(record.bytes() < bytes);
  CHECK_FALSE(record.knows(kGraphA));
  record.add(call(5), makes(kGraphA));  // the handle is given again: another object
  CHECK(calls(record) == Calls{2, 5});
}

TEST_CASE("record: what made a living object stays, ended or not") {
  Record record;
  record.add(call(1), makes(kGraphA));
  record.add(call(2), makes(kExecA, {kGraphA}));
  record.add(call(3), ends(kGraphA));
  CHECK(calls(record) == Calls{1, 2, 3});
  record.add(call(4), makes(kGraphA));  // another life of that handle
  record.add(call(5), ends(kExecA));
  CHECK(calls(record) == Calls{4});
}

TEST_CASE("record: what has gone ahead stays, ended or not, until the session stays here") {
  const auto may = [](uint32_t call) { return call != 9; };
  const auto ids = [](const std::vector<Record::Entry>& entries) {
    Calls ids;
    for (const auto& entry : entries) ids.push_back(entry.frame.call);
    return ids;
  };
  Record record;
  record.add(call(1), makes(kGraphA));
  record.add(call(2), sets(kGraphA, 7));
  record.add(call(3), makes(kStreamA));
  CHECK(ids(record.goAhead(may)) == Calls{1, 2, 3});
  CHECK(record.goAhead(may).empty());
  record.add(call(4), sets(kGraphA, 7));
  record.add(call(5), ends(kStreamA));
  record.add(call(6), makes(kExecA));
  record.add(call(7), ends(kExecA));  // has not gone: it leaves nothing
  record.add(call(9), makes(kGraphB));
  record.add(call(8), makes(kStreamA));
  CHECK(calls(record) == Calls{4, 5, 9, 8});
  CHECK(ids(record.goAhead(may)) == Calls{4, 5});
  CHECK(record.ahead() == 5);
  record.add(call(10), ends(kStreamA));  // of the second life, which has not gone
  CHECK(calls(record) == Calls{9});
  record.add(call(11), ends(kGraphA));
  CHECK(calls(record) == Calls{9, 11});
  CHECK(record.size() == 7);
  record.callBack();
  CHECK(record.ahead() == 0);
  CHECK(calls(record) == Calls{9});
  record.add(call(12), ends(kGraphB));
  CHECK(record.bytes() == 0);
}

TEST_CASE("record: names of parts belong to the whole") {
  Record record;
  const uint64_t node = makeHandle(Kind::graphNode, 1, 1);
  record.add(call(1), makes(kGraphA));
  Record::Deed part = sets(kGraphA, 0, {}, Kept::always);
  part.aliases = {node};
  record.add(call(2), part);
  record.add(call(3), makes(kExecA, {node}));
  record.add(call(4), ends(kGraphA));
  CHECK(calls(record) == Calls{1, 2, 3, 4});
  CHECK_FALSE(record.knows(node));
  record.add(call(5), ends(kExecA));
  CHECK(record.size() == 0);
}

TEST_CASE("record: the last setting counts, unless somebody has used the one before") {
  Record record;
  record.add(call(1), makes(kGraphA));
  record.add(call(2), sets(kGraphA, 7));
  record.add(call(3), sets(kGraphA, 8));
  record.add(call(4), sets(kGraphA, 7));
  CHECK(calls(record) == Calls{1, 3, 4});
  record.add(call(5), makes(kExecA, {kGraphA}));
  record.add(call(6), sets(kGraphA, 7));
  CHECK(calls(record) == Calls{1, 3, 4, 5, 6});  // the exec was made with what call 4 had set
  for (int i = 0; i < 1000; ++i) record.add(call(7), sets(kGraphA, 7));
  CHECK(calls(record) == Calls{1, 3, 4, 5, 7});
  for (int i = 0; i < 1000; ++i) record.add(call(8), sets(kGraphA, 9, {}, Kept::first));
  CHECK(calls(record) == Calls{1, 3, 4, 5, 7, 8});
}

TEST_CASE("record: a setting that is said again says nothing new") {
  Record record;
  record.add(call(1), makes(kContextA));
  record.add(call(2), sets(kContextA, 7));
  for (int i = 0; i < 1000; ++i) {
    record.add(call(3, kContextA), makes(kStreamA));  // uses the context
    record.add(call(2), sets(kContextA, 7));
    record.add(call(4), ends(kStreamA));
  }
  CHECK(calls(record) == Calls{1, 2});
  auto other = call(2);
  other.arguments[0] = std::byte{1};
  record.add(call(3, kContextA), makes(kStreamA));
  record.add(other, sets(kContextA, 7));
  CHECK(calls(record) == Calls{1, 2, 3, 2});
}

TEST_CASE("record: a node that is set anew before each update of an exec leaves no trace of what it was") {
  Record record;
  record.add(call(1), makes(kGraphA));
  record.add(call(2), makes(kExecA, {kGraphA}));
  const auto step = [&](unsigned char value) {
    auto set = call(3);
    set.arguments[0] = std::byte{value};
    record.add(set, sets(kGraphA, 7));
    record.add(call(4), sets(kExecA, 8, {kGraphA}));
  };
  for (int i = 0; i < 1000; ++i) step(static_cast<unsigned char>(i));
  CHECK(record.size() <= 6);
  const size_t bytes = record.bytes();
  for (int i = 0; i < 1000; ++i) step(static_cast<unsigned char>(i));
  CHECK(record.bytes() == bytes);
  // The same again is said again: an update may have come between.
  const size_t size = record.size();
  record.add(call(5), sets(kExecA, 9));
  record.add(call(6), sets(kExecA, 10));
  record.add(call(5), sets(kExecA, 9));
  CHECK(calls(record).back() == 5);
  CHECK(record.size() == size + 2);
}

TEST_CASE("record: a context takes along what was made in it, but not what others were made from") {
  Record record;
  record.add(call(1), makes(kContextA));
  record.add(call(2, kContextA), makes(kStreamA));
  record.add(call(3, kContextA), makes(kGraphA));
  record.endContext(kContextA, call(4));
  CHECK(calls(record) == Calls{1, 3, 4});  // a graph belongs to no context, but was made in this one
  CHECK_FALSE(record.knows(kStreamA));
  CHECK_FALSE(record.knows(kContextA));
  record.add(call(5), ends(kGraphA));
  CHECK(record.size() == 0);
}

TEST_CASE("record: a primary context that is retained again is the same") {
  Record record;
  record.add(call(1), makes(kContextA));
  record.add(call(2, kContextA), makes(kStreamA));
  record.add(call(3), makes(kContextA));
  CHECK(calls(record) == Calls{1, 2});
}

TEST_CASE("record: code that was unloaded has moved the places of what came after it") {
  Record record;
  const auto load = [&](uint64_t module) {
    Record::Deed deed = makes(module);
    deed.placed = true;
    record.add(call(1), deed);
  };
  load(kModuleA);
  record.add(call(2), ends(kModuleA));
  CHECK(calls(record) == Calls{1, 2});
  for (uint32_t i = 2; i < 3 * Record::kMostUnloaded; ++i) {
    load(makeHandle(Kind::module, i, 1));
    record.add(call(2), ends(makeHandle(Kind::module, i, 1)));
  }
  CHECK(record.size() == 2 * Record::kMostUnloaded);
}

TEST_CASE("record: a graph that was moved into another one ends with it") {
  Record record;
  record.add(call(1), makes(kGraphA));
  record.add(call(2), makes(kGraphB));
  record.add(call(3), sets(kGraphA, 0, {kGraphB}, Kept::always));
  record.consume(kGraphB);
  record.add(call(4), sets(kGraphB, 0, {}, Kept::always));  // its nodes can still be set
  CHECK(calls(record) == Calls{1, 2, 3, 4});
  record.add(call(5), ends(kGraphA));
  CHECK(record.size() == 0);
}

TEST_CASE("record: a name of nothing names nothing") {
  Record record;
  record.alias(kGraphA, 0);
  CHECK(!record.knows(kGraphA));
  CHECK(!record.knows(0));
}

TEST_CASE("record: a capture becomes its graph, or nothing") {
  Record record;
  const uint64_t capture = Record::capture(17);
  record.add(call(1), makes(capture, {kStreamA}));
  record.add(call(2), sets(capture, 0, {}, Kept::always));
  record.alias(kGraphA, capture);
  CHECK(record.knows(kGraphA));
  record.add(call(3), makes(kExecA, {kGraphA}));
  record.add(call(4), ends(kGraphA));
  CHECK(calls(record) == Calls{1, 2, 3, 4});
  record.add(call(5), ends(kExecA));
  CHECK(record.size() == 0);
  record.add(call(6), makes(Record::capture(18)));
  record.abandon(Record::capture(18));
  CHECK(record.size() == 0);
}

// Against a model that looks at everything: an entry stays if its object lives, or if an entry that stays and
// belongs to another object uses it.
TEST_CASE("record: random lives, against a plain model") {
  struct Line {
    uint32_t id;
    int object;
    std::vector<int> uses;
  };
  const int rounds = 40;
  for (int seed = 1; seed <= rounds; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    Record record;
    std::vector<Line> lines;
    std::vector<bool> alive;
    const auto handle = [](int object) {
      return makeHandle(Kind::graph, static_cast<uint32_t>(object + 1), 1);
    };
    uint32_t id = 0;
    for (int step = 0; step < 300; ++step) {
      std::vector<int> living;
      for (size_t i = 0; i < alive.size(); ++i)
        if (alive[i]) living.push_back(static_cast<int>(i));
      std::vector<int> uses;
      std::vector<uint64_t> used;
      for (int n = static_cast<int>(random() % 3); n > 0 && !living.empty(); --n) {
        uses.push_back(living[random() % living.size()]);
        used.push_back(handle(uses.back()));
      }
      const unsigned what = random() % 10;
      ++id;
      if (what < 4 || living.empty()) {
        const int object = static_cast<int>(alive.size());
        alive.push_back(true);
        record.add(call(id), makes(handle(object), used));
        lines.push_back({id, object, uses});
      } else {
        const int object = living[random() % living.size()];
        Record::Deed deed = what < 7 ? sets(handle(object), 0, used, Kept::always) : ends(handle(object));
        deed.uses = used;
        record.add(call(id), deed);
        lines.push_back({id, object, uses});
        if (what >= 7) alive[static_cast<size_t>(object)] = false;
      }
      // The model: grow the set of wanted objects from those that live.
      std::set<int> wanted;
      for (size_t i = 0; i < alive.size(); ++i)
        if (alive[i]) wanted.insert(static_cast<int>(i));
      for (bool grew = true; grew;) {
        grew = false;
        for (const Line& line : lines)
          if (wanted.contains(line.object))
            for (const int use : line.uses) grew |= wanted.insert(use).second;
      }
      Calls expected;
      for (const Line& line : lines)
        if (wanted.contains(line.object)) expected.push_back(line.id);
      const Calls got = calls(record);
      // Objects that use each other in a ring stay when both have ended: none of the driver's objects do. So
      // what the record keeps is what is wanted, and perhaps more.
      INFO("seed " << seed << ", step " << step);
      REQUIRE(std::includes(got.begin(), got.end(), expected.begin(), expected.end()));
    }
    for (size_t i = 0; i < alive.size(); ++i)
      if (alive[i]) record.add(call(++id), ends(handle(static_cast<int>(i))));
  }
}
