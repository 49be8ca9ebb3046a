// One suite for every store; then what only a file can show: it survives the writer's death and belongs to
// one.
#include "pool-manager/store/store.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "catch.h"
#include "support.h"

using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

std::optional<uint64_t> put(Store& store, const std::string& key, const std::string& value) {
  const Write write{key, value};
  return store.commit({}, {&write, 1});
}

void conforms(Store& store) {
  CHECK(store.range("").empty());
  CHECK_FALSE(store.get("a"));
  const auto first = put(store, "a/1", "one");
  REQUIRE(first);
  CHECK(*first > 0);
  CHECK(store.get("a/1")->value == "one");
  CHECK(store.get("a/1")->revision == *first);

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
    const Write writes[] = {{"x", "1"}, {"y", "2"}};
    const auto both = store.commit({}, writes);
    REQUIRE(both);
    CHECK(*both > *first);
    CHECK(store.get("x")->revision == *both);
    CHECK(store.get("y")->revision == *both);
    CHECK(*put(store, "x", "3") > *both);
    CHECK(store.get("y")->revision == *both);
  }
  SECTION("a failed comparison changes nothing") {
    const Write write{"a/1", "two"};
    const Compare absent{"a/1", 0}, stale{"a/1", *first + 100}, missing{"zz", 1};
    CHECK_FALSE(store.commit({&absent, 1}, {&write, 1}));
    CHECK_FALSE(store.commit({&stale, 1}, {&write, 1}));
    CHECK_FALSE(store.commit({&missing, 1}, {&write, 1}));
    CHECK(store.get("a/1")->value == "one");
    const Compare right[] = {{"a/1", *first}, {"zz", 0}};
    CHECK(store.commit(right, {&write, 1}));
    CHECK(store.get("a/1")->value == "two");
    CHECK_FALSE(store.commit(right, {&write, 1}));  // the revision has moved on
  }
  SECTION("what is erased is absent") {
    const Write erase[] = {{"a/1", std::nullopt}, {"never", std::nullopt}};
    CHECK(store.commit({}, erase));
    CHECK_FALSE(store.get("a/1"));
    const Compare absent{"a/1", 0};
    const Write again{"a/1", "new"};
    const auto revision = store.commit({&absent, 1}, {&again, 1});
    REQUIRE(revision);
    CHECK(*revision > *first);
  }
  SECTION("an empty value is a value") {
    put(store, "empty", "");
    REQUIRE(store.get("empty"));
    CHECK(store.get("empty")->value.empty());
  }
}

}  // namespace

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
    revision = *put(*store, "key", "value");
    struct stat info {};
    REQUIRE(::stat(path.c_str(), &info) == 0);
    CHECK((info.st_mode & 0777) == 0600);
    CHECK(contains(thrown([&] { openSqliteStore(path); }), "in use by another gpupool-manager"));
  }
  const auto again = openSqliteStore(path);
  REQUIRE(again->get("key"));
  CHECK(again->get("key")->revision == revision);
  CHECK(*put(*again, "key", "other") > revision);
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
        const Write writes[] = {{"a/" + std::to_string(i), "x"},
                                {"b/" + std::to_string(i), std::string(3000, 'y')}};
        if (!store->commit({}, writes) || ::write(acknowledged[1], &i, sizeof i) < 0) ::_exit(1);
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
