#include "client/handles.h"

#include <set>
#include <thread>
#include <vector>

#include "catch.h"
#include "client/ended_streams.h"

using namespace gpupool::client;

namespace {

struct Counted {
  explicit Counted(std::atomic<int>* alive = nullptr, int value = 0) : value(value), alive(alive) {
    if (alive) alive->fetch_add(1);
  }
  ~Counted() {
    value = -1;
    if (alive) alive->fetch_sub(1);
  }
  int value;
  std::atomic<int>* alive;
};

constinit HandleTable<Counted> staticTable{Kind::event};
static_assert(std::is_trivially_destructible_v<HandleTable<Counted>>);

}  // namespace

TEST_CASE("handles: the parts of an id come back") {
  const uint64_t id = makeHandle(Kind::graphNode, 0x123456, 0x789);
  CHECK(kindOf(id) == Kind::graphNode);
  CHECK(indexOf(id) == 0x123456);
  CHECK(generationOf(id) == 0x789);
  CHECK(id >> 47 == 0);
  CHECK(id % 16 == 0);
  CHECK(kindOf(id + 8) == Kind::none);
  CHECK(kindOf(id | uint64_t{1} << 60) == Kind::none);
  CHECK(kindOf(0x7f00'0000'1000) == Kind::none);
}

TEST_CASE("handles: create, find, destroy") {
  std::atomic<int> alive{0};
  const auto created = staticTable.create(&alive, 7);
  REQUIRE(created.object != nullptr);
  CHECK(staticTable.find(created.id) == created.object);
  CHECK(staticTable.find(created.id)->value == 7);
  CHECK(staticTable.find(makeHandle(Kind::stream, indexOf(created.id), 0)) == nullptr);
  CHECK(staticTable.find(0) == nullptr);
  CHECK(staticTable.find(1) == nullptr);
  CHECK(staticTable.find(makeHandle(Kind::event, 0xffffff, 0)) == nullptr);
  CHECK(staticTable.destroy(created.id));
  CHECK_FALSE(staticTable.destroy(created.id));
  CHECK(staticTable.find(created.id) == nullptr);
  CHECK(alive == 0);
}

TEST_CASE("handles: a pin outlives destroy") {
  std::atomic<int> alive{0};
  static constinit HandleTable<Counted> table{Kind::stream};
  const auto created = table.create(&alive, 3);
  {
    auto pin = table.pin(created.id);
    REQUIRE(pin);
    CHECK(table.destroy(created.id));
    CHECK_FALSE(table.pin(created.id));
    CHECK(alive == 1);
    CHECK(pin->value == 3);
  }
  CHECK(alive == 0);
}

TEST_CASE("handles: reuse is late and changes the generation") {
  static constinit HandleTable<Counted> table{Kind::event};
  std::set<uint64_t> seen;
  bool reused = false;
  for (int i = 0; i < 5000; ++i) {
    const auto created = table.create();
    REQUIRE(seen.insert(created.id).second);
    reused = reused || generationOf(created.id) > 0;
    REQUIRE(table.destroy(created.id));
  }
  CHECK(reused);
  CHECK(table.size() == 0);
}

TEST_CASE("handles: forEach sees the live ones") {
  static constinit HandleTable<Counted> table{Kind::module};
  std::vector<uint64_t> ids;
  ids.reserve(600);
  for (int i = 0; i < 600; ++i) ids.push_back(table.create(nullptr, i).id);
  for (int i = 0; i < 600; i += 2) table.destroy(ids[i]);
  int count = 0;
  table.forEach([&](uint64_t id, Counted& object) {
    CHECK(ids[object.value] == id);
    CHECK(object.value % 2 == 1);
    ++count;
  });
  CHECK(count == 300);
}

TEST_CASE("handles: concurrent pins never see a destructed object") {
  static constinit HandleTable<Counted> table{Kind::kernel};
  std::atomic<uint64_t> shared{0};
  std::atomic<bool> stop{false};
  std::atomic<int> bad{0};
  std::vector<std::thread> readers;
  readers.reserve(3);
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      while (!stop.load()) {
        if (auto pin = table.pin(shared.load())) bad += pin->value != 42;
      }
    });
  }
  for (int i = 0; i < 20000; ++i) {
    const auto created = table.create(nullptr, 42);
    shared = created.id;
    table.destroy(created.id);
  }
  stop = true;
  for (auto& reader : readers) reader.join();
  CHECK(bad == 0);
}

TEST_CASE("handles: streams that ended with their context are known for a while, and not without bound") {
  const auto stream = [](uint64_t number) { return reinterpret_cast<CUstream>(0x100000 + number); };
  constexpr uint64_t kMany = 3 * EndedStreams::kMost;
  EndedStreams ended;
  for (uint64_t i = 0; i < kMany; ++i) {
    ended.add(stream(i));
    ended.add(stream(i));  // of one it is known once
  }
  CHECK(ended.contains(stream(kMany - 1)));
  CHECK(ended.contains(stream(kMany - EndedStreams::kMost)));
  CHECK_FALSE(ended.contains(stream(kMany - EndedStreams::kMost - 1)));
  CHECK_FALSE(ended.contains(stream(kMany)));
}
