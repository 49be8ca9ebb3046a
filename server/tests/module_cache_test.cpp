// The folder of code images as the server keeps it: made, open to who needs it, and within its bound.
#include "server/front/module_cache.h"

#include <kj/async.h>
#include <kj/timer.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include "catch.h"
#include "server/tests/support.h"

using namespace gpupool::server;
using namespace gpupool::server::test;
namespace fs = std::filesystem;

namespace {

struct Bench {
  kj::EventLoop loop;
  kj::WaitScope waitScope{loop};
  kj::TimerImpl timer{kj::origin<kj::TimePoint>()};
  Folder folder;
  fs::path cache = fs::path(folder.path) / "below" / "cache";

  // Of a tenant, last used so many minutes ago.
  fs::path image(const std::string& name, size_t bytes, int minutes) const {
    fs::create_directories(cache / "tenant");
    const fs::path path = cache / "tenant" / name;
    std::ofstream(path) << std::string(bytes, 'x');
    fs::last_write_time(path, fs::file_time_type::clock::now() - std::chrono::minutes(minutes));
    return path;
  }
  void pass(kj::Duration time) {
    timer.advanceTo(timer.now() + time);
    waitScope.poll();
  }
};

}  // namespace

TEST_CASE("the module cache's folder is made, and where there can be none there is no cache") {
  Bench bench;
  CHECK(ModuleCache(bench.timer, "", 100, false).folder().empty());
  CHECK(ModuleCache(bench.timer, bench.cache, 100, false).folder() == bench.cache);
  CHECK(fs::is_directory(bench.cache));
  std::ofstream(bench.folder.path + "/file") << "x";
  CHECK(ModuleCache(bench.timer, bench.folder.path + "/file/cache", 100, false).folder().empty());
}

TEST_CASE("the module cache of workers of other users has to be reached by them") {
  Bench bench;
  REQUIRE(fs::status(bench.folder.path).permissions() == fs::perms::owner_all);
  CHECK(ModuleCache(bench.timer, bench.cache, 100, true).folder().empty());
  fs::permissions(bench.folder.path, fs::perms{0711});
  fs::permissions(bench.cache.parent_path(), fs::perms{0711});
  CHECK(ModuleCache(bench.timer, bench.cache, 100, true).folder() == bench.cache);
  CHECK(fs::status(bench.cache).permissions() == fs::perms{0711});  // they list nothing
}

TEST_CASE("the images of all tenants together are kept within the bound, at once and every minute") {
  Bench bench;
  const fs::path old = bench.image("old", 60, 3), middle = bench.image("middle", 60, 2);
  const ModuleCache cache(bench.timer, bench.cache, 100, false);
  CHECK_FALSE(fs::exists(old));
  CHECK(fs::exists(middle));
  const fs::path late = bench.image("late", 60, 0);
  bench.pass(59 * kj::SECONDS);
  CHECK(fs::exists(middle));
  bench.pass(1 * kj::SECONDS);
  CHECK_FALSE(fs::exists(middle));
  CHECK(fs::exists(late));
  const fs::path later = bench.image("later", 60, -1);
  bench.pass(1 * kj::MINUTES);
  CHECK_FALSE(fs::exists(late));
  CHECK(fs::exists(later));
}
