// One suite for every store; then what only a file can show: it survives the writer's death and belongs to
// one.
#include "pool-manager/store/medium.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <future>

#include "catch.h"
#include "support.h"

using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

std::optional<Entry> get(Store& store, const std::string& key) {
  for (Entry& entry : store.range(key))
    if (entry.key == key) return entry;
  return std::nullopt;
}

// Commits, and waits until it is told; 0: a comparison failed.
uint64_t commit(Store& store, std::vector<Compare> compares, std::vector<Write> writes) {
  std::optional<Outcome> outcome;
  store.commit({std::move(compares), std::move(writes)}, [&](const Outcome& told) { outcome = told; });
  CHECK_FALSE(outcome);  // never from inside
  while (!outcome) {
    if (store.deliver()) continue;
    std::promise<void> ready;
    store.whenReady([&] { ready.set_value(); });
    ready.get_future().wait();
  }
  CHECK(outcome->kind != Outcome::Kind::failed);
  return outcome->committed() ? outcome->revision : 0;
}

uint64_t put(Store& store, const std::string& key, const std::string& value) {
  return commit(store, {}, {{key, value}});
}

void conforms(Store& store) {
  CHECK(store.range("").empty());
  CHECK_FALSE(get(store, "a"));
  const uint64_t first = put(store, "a/1", "one");
  CHECK(first > 0);
  CHECK(get(store, "a/1")->value == "one");
  CHECK(get(store, "a/1")->revision == first);

  SECTION("a range is a prefix, in order") {
    put(store, "a/3", "three");
    put(store, "a/2", std::string("with\0zero", 9));
    put(store, "b", "other");
    put(store, "a", "short");
    const auto range = store.range("a/");
    REQUIRE(range.size() == 3);
    CHECK(range[0].key == "a/1");
    CHECK(range[1].key == "a/2");
    CHECK(range[1].value == std::string("with\0zero", 9));
    CHECK(range[2].key == "a/3");
    CHECK(store.range("").size() == 5);
    CHECK(store.range("a/4").empty());
  }
  SECTION("revisions grow, one a transaction") {
    const uint64_t both = commit(store, {}, {{"x", "1"}, {"y", "2"}});
    CHECK(both > first);
    CHECK(get(store, "x")->revision == both);
    CHECK(get(store, "y")->revision == both);
    CHECK(put(store, "x", "3") > both);
    CHECK(get(store, "y")->revision == both);
  }
  SECTION("a failed comparison changes nothing") {
    CHECK_FALSE(commit(store, {{"a/1", 0}}, {{"a/1", "two"}}));
    CHECK_FALSE(commit(store, {{"a/1", first + 100}}, {{"a/1", "two"}}));
    CHECK_FALSE(commit(store, {{"zz", 1}}, {{"a/1", "two"}}));
    CHECK(get(store, "a/1")->value == "one");
    CHECK(commit(store, {{"a/1", first}, {"zz", 0}}, {{"a/1", "two"}}));
    CHECK(get(store, "a/1")->value == "two");
    CHECK_FALSE(commit(store, {{"a/1", first}}, {{"a/1", "three"}}));  // the revision has moved on
  }
  SECTION("what is erased is absent") {
    CHECK(commit(store, {}, {{"a/1", std::nullopt}, {"never", std::nullopt}}));
    CHECK_FALSE(get(store, "a/1"));
    CHECK(commit(store, {{"a/1", 0}}, {{"a/1", "new"}}) > first);
  }
  SECTION("an empty value is a value") {
    put(store, "empty", "");
    REQUIRE(get(store, "empty"));
    CHECK(get(store, "empty")->value.empty());
  }
  SECTION("commits are told in their order, each with an outcome of its own") {
    std::vector<int> told;
    for (int i = 0; i < 1000; ++i)
      store.commit({i % 3 == 0 ? std::vector<Compare>{{"none", 7}} : std::vector<Compare>{},
                    {{"n/" + std::to_string(i), "x"}}},
                   [&told, i](const Outcome& outcome) {
                     CHECK(outcome.committed() == (i % 3 != 0));
                     told.push_back(i);
                   });
    commit(store, {}, {});
    REQUIRE(told.size() == 1000);
    CHECK(std::is_sorted(told.begin(), told.end()));
    CHECK(store.range("n/").size() == 666);
  }
  SECTION("a watcher sees every write below its prefix, once it is durable") {
    std::vector<std::string> seen;
    store.watch("w/", [&](const Write& write, uint64_t revision) {
      CHECK(revision > first);
      seen.push_back(write.key + (write.value ? "=" + *write.value : " erased"));
    });
    put(store, "other", "x");
    put(store, "w/1", "a");
    commit(store, {{"w/1", 0}}, {{"w/1", "never"}});
    commit(store, {}, {{"w/1", std::nullopt}});
    CHECK(seen == std::vector<std::string>{"w/1=a", "w/1 erased"});
  }
  SECTION("whoever starts writes and waits") {
    CHECK(store.commitNow({{}, {{"now", "1"}}}).committed());
    CHECK(store.commitNow({{{"now", 0}}, {{"now", "2"}}}).kind == Outcome::Kind::compareFailed);
    CHECK(get(store, "now")->value == "1");
  }
}

// Counts how often it is written to.
class Counting final : public Medium {
 public:
  explicit Counting(int* groups) : groups_(groups) {}
  std::vector<Entry> range(const std::string& prefix) override { return medium_->range(prefix); }
  std::vector<Outcome> apply(std::span<const Transaction> group) override {
    ++*groups_;
    return medium_->apply(group);
  }

 private:
  std::unique_ptr<Medium> medium_ = makeMemoryMedium();
  int* groups_;
};

}  // namespace

TEST_CASE("what waits is written together") {
  int groups = 0;
  const auto store = makeStore(std::make_unique<Counting>(&groups), WritesOn::deliver);
  int told = 0;
  for (int i = 0; i < 100; ++i)
    store->commit({{}, {{"k", std::to_string(i)}}}, [&](const Outcome&) { ++told; });
  CHECK(store->deliver());
  CHECK(told == 100);
  CHECK(groups == 1);
  CHECK(store->range("k").at(0).value == "99");
}

TEST_CASE("the store in memory conforms") {
  const auto store = makeMemoryStore();
  conforms(*store);
}

TEST_CASE("the SQLite store conforms") {
  Folder folder;
  const auto store = openSqliteStore(folder.path + "/db");
  conforms(*store);
}

TEST_CASE("a file is private, durable, and one manager's") {
  Folder folder;
  const std::string path = folder.path + "/db";
  uint64_t revision = 0;
  {
    const auto store = openSqliteStore(path);
    revision = put(*store, "key", "value");
    struct stat info{};
    REQUIRE(::stat(path.c_str(), &info) == 0);
    CHECK((info.st_mode & 0777) == 0600);
    CHECK(contains(thrown([&] { openSqliteStore(path); }), "in use by another gpupool-manager"));
  }
  const auto again = openSqliteStore(path);
  REQUIRE(get(*again, "key"));
  CHECK(get(*again, "key")->revision == revision);
  CHECK(put(*again, "key", "other") > revision);
  CHECK_THROWS_AS(openSqliteStore(folder.path + "/no/such/folder/db"), std::runtime_error);
}

// The child acknowledges each commit through a pipe; every acknowledged one must be there after the kill,
// whole.
TEST_CASE("no acknowledged transaction is lost when the writer is killed") {
  Folder folder;
  const std::string path = folder.path + "/db";
  uint32_t expected = 0;
  for (int round = 0; round < 3; ++round) {
    int acknowledged[2];
    REQUIRE(::pipe(acknowledged) == 0);
    const pid_t writer = ::fork();
    if (writer == 0) {
      const auto store = openSqliteStore(path);
      for (uint32_t i = expected;; ++i) {
        const Transaction both{
            {}, {{"a/" + std::to_string(i), "x"}, {"b/" + std::to_string(i), std::string(3000, 'y')}}};
        if (!store->commitNow(both).committed() || ::write(acknowledged[1], &i, sizeof i) < 0) ::_exit(1);
      }
    }
    ::close(acknowledged[1]);
    uint32_t last = 0;
    for (int i = 0; i < 40; ++i) REQUIRE(::read(acknowledged[0], &last, sizeof last) == sizeof last);
    ::kill(writer, SIGKILL);
    for (uint32_t more; ::read(acknowledged[0], &more, sizeof more) == sizeof more;) last = more;
    ::close(acknowledged[0]);
    int status = 0;
    ::waitpid(writer, &status, 0);
    REQUIRE(WIFSIGNALED(status));
    const auto store = openSqliteStore(path);
    const size_t a = store->range("a/").size(), b = store->range("b/").size();
    CHECK(a == b);
    CHECK(a >= last + 1);
    CHECK(a <= last + 2);  // one may have committed without a word
    expected = static_cast<uint32_t>(a);
  }
}
