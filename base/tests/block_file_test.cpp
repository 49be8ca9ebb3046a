#include "base/block_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "catch.h"

using namespace gpupool;

namespace {

using Bytes = std::vector<std::byte>;

struct Bench {
  explicit Bench(uint64_t most) : most(most) {}
  BlockFile::Room room() {
    return {[this](uint64_t more) -> std::string {
              std::lock_guard lock(mutex);
              if (more > most - used) return "no room";
              used += more;
              return "";
            },
            [this](uint64_t less) {
              std::lock_guard lock(mutex);
              used -= less;
            }};
  }
  const uint64_t most;
  std::mutex mutex;
  uint64_t used = 0;
};

Bytes filled(uint64_t bytes, int value) { return Bytes(bytes, static_cast<std::byte>(value)); }

std::shared_ptr<const BlockFile::Block> put(BlockFile& file, const Bytes& bytes) {
  std::string why;
  auto block = file.reserve(bytes.size(), why);
  REQUIRE(why.empty());
  REQUIRE(block->write(bytes).empty());
  return block;
}

Bytes get(const BlockFile::Block& block) {
  Bytes bytes(block.bytes());
  REQUIRE(block.read(bytes).empty());
  return bytes;
}

}  // namespace

TEST_CASE("blocks keep their bytes, and their room is counted in whole pages") {
  Bench bench(uint64_t{16} * 4096);
  std::string why;
  const bool inFolder = GENERATE(false, true);
  auto file = inFolder ? BlockFile::inFolder(std::filesystem::temp_directory_path(), bench.room(), why)
                       : BlockFile::inMemory("test", bench.room(), why);
  REQUIRE(file != nullptr);
  auto first = put(*file, filled(5000, 1)), second = put(*file, filled(4096, 2)),
       third = put(*file, filled(8, 3));
  CHECK(bench.used == uint64_t{4} * 4096);
  CHECK(get(*first) == filled(5000, 1));
  CHECK(get(*second) == filled(4096, 2));
  CHECK(get(*third) == filled(8, 3));
  CHECK(file->reserve(uint64_t{13} * 4096, why) == nullptr);
  CHECK(why == "no room");
  CHECK(file->reserve(UINT64_MAX, why) == nullptr);
  CHECK(bench.used == uint64_t{4} * 4096);
  file = nullptr;  // its blocks keep it
  first = nullptr;
  CHECK(get(*second) == filled(4096, 2));
  second = third = nullptr;
  CHECK(bench.used == 0);
}

TEST_CASE("the place of a block that has gone is given back, and used again") {
  Bench bench(64 << 20);
  std::string why;
  auto file = BlockFile::inMemory("test", bench.room(), why);
  auto stays = put(*file, filled(4096, 1));
  const auto taken = [&] {
    struct stat status{};
    REQUIRE(fstat(stays->file(), &status) == 0);
    return static_cast<uint64_t>(status.st_blocks) * 512;
  };
  auto goes = put(*file, filled(2 << 20, 2));
  const uint64_t offset = goes->offset();
  CHECK(taken() >= (2 << 20));
  goes = nullptr;
  CHECK(taken() < (1 << 20));
  auto next = put(*file, filled((2 << 20) - 100, 3));  // as many pages
  CHECK(next->offset() == offset);
  CHECK(get(*next) == filled((2 << 20) - 100, 3));
  CHECK(get(*stays) == filled(4096, 1));
}

TEST_CASE("blocks come and go on several threads") {
  Bench bench(64 << 20);
  std::string why;
  auto file = BlockFile::inMemory("test", bench.room(), why);
  std::vector<std::thread> threads;
  threads.reserve(4);
  std::atomic<int> wrong{0};
  for (int thread = 0; thread < 4; ++thread)
    threads.emplace_back([&, thread] {
      for (int round = 0; round < 200; ++round) {
        std::string none;
        const Bytes bytes = filled(uint64_t{4096} * (1 + round % 3), thread * 50 + round % 50);
        auto block = file->reserve(bytes.size(), none);
        Bytes back(bytes.size());
        if (block == nullptr || !block->write(bytes).empty() || !block->read(back).empty() || back != bytes)
          ++wrong;
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(bench.used == 0);
}

TEST_CASE("a folder that is not there: why") {
  Bench bench(4096);
  std::string why;
  CHECK(BlockFile::inFolder("/nonexistent/folder", bench.room(), why) == nullptr);
  CHECK(why.find("No such file") != std::string::npos);
}
