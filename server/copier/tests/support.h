#pragma once
// A copier in this process: connections served by threads, workers' memory from the software GPU.

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/descriptor_passing.h"
#include "server/copier/connection.h"
#include "server/copier/link.h"

#include "catch.h"

namespace gpupool::server::test {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;
inline constexpr uint64_t kUnit = kCopierUnit;

inline const Driver& softDriver() {
  static const Driver* driver = [] {
    setenv("GPUPOOL_SOFT_DEVICES", "2", 1);
    setenv("GPUPOOL_SOFT_MEMORY", "2GiB", 1);
    auto loaded = Driver::load(SOFT_DRIVER);
    if (loaded->cuInit(0) != CUDA_SUCCESS) abort();
    return loaded.release();
  }();
  return *driver;
}

inline void must(CUresult result) {
  INFO(softDriver().describe(result));
  REQUIRE(result == CUDA_SUCCESS);
}

template <class Condition>
bool eventually(Condition condition) {
  for (const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30); !condition();) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

struct Folder {
  std::string path;
  Folder() {
    char name[] = "/tmp/gpupool-copier-XXXXXX";
    if (mkdtemp(name) == nullptr) abort();
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  bool empty() const { return std::filesystem::is_empty(path); }
};

inline std::pair<Descriptor, Descriptor> socketPair() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) abort();
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

// One whose connections have all ended when it does.
class TestCopier {
 public:
  explicit TestCopier(CopierStore::Options options, bool verify = false) : verify_(verify) {
    options.slabBytes = 16 * kMiB;
    options.onSlab = [](std::byte* data, uint64_t bytes) { shared().registerMemory(data, bytes); };
    store_.emplace(std::move(options));
  }
  explicit TestCopier(uint64_t budget = 256 * kMiB, bool verify = false)
      : TestCopier(CopierStore::Options{budget, {}, 0, nullptr, nullptr}, verify) {}
  ~TestCopier() {
    for (auto& thread : threads_) thread.join();
  }

  // A worker's end.
  Descriptor connect() {
    auto [mine, theirs] = socketPair();
    ++open_;
    threads_.emplace_back([this, socket = std::move(mine)]() mutable {
      {
        CopierConnection connection(std::move(socket), devices_, *store_, verify_);
        connection.serve();
      }
      --open_;
    });
    return std::move(theirs);
  }
  CopierStore& store() { return *store_; }
  int open() const { return open_; }
  bool idle() {
    const auto usage = store_->usage();
    return open_ == 0 && usage.memory == 0 && usage.disk == 0;
  }

 private:
  // The slabs outlive the store, and so must who knows them.
  static CopierDevices& shared() {
    static auto* const devices = new CopierDevices(softDriver());
    return *devices;
  }
  CopierDevices& devices_ = shared();
  const bool verify_;
  std::optional<CopierStore> store_;
  std::atomic<int> open_{0};
  std::vector<std::thread> threads_;
};

// A worker's device memory, each word of it told by a seed.
class Memory {
 public:
  explicit Memory(std::vector<CopierPiece> pieces) : pieces_(std::move(pieces)), blocks_(pieces_.size()) {
    for (uint32_t ordinal = 0; ordinal < 2; ++ordinal) {
      CUcontext context = nullptr;
      must(softDriver().cuDevicePrimaryCtxRetain(&context, static_cast<int>(ordinal)));
      must(softDriver().cuCtxSetCurrent(context));
    }
  }
  ~Memory() {
    for (size_t i = 0; i < blocks_.size(); ++i) release(i);
  }
  const std::vector<CopierPiece>& pieces() const { return pieces_; }
  void create(size_t index) {
    Block& block = blocks_[index];
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = static_cast<int>(pieces_[index].ordinal);
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemAccessDesc access{};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const uint64_t bytes = pieces_[index].bytes;
    must(softDriver().cuMemCreate(&block.handle, bytes, &properties, 0));
    must(softDriver().cuMemAddressReserve(&block.address, bytes, 0, 0, 0));
    must(softDriver().cuMemMap(block.address, bytes, 0, block.handle, 0));
    must(softDriver().cuMemSetAccess(block.address, bytes, &access, 1));
  }
  void createAll() {
    for (size_t i = 0; i < blocks_.size(); ++i) create(i);
  }
  // The software GPU's memory is the processor's too.
  uint64_t* words(size_t index) const { return reinterpret_cast<uint64_t*>(blocks_[index].address); }
  void fill(uint64_t seed) {
    for (size_t i = 0; i < blocks_.size(); ++i)
      for (uint64_t at = 0; at < pieces_[i].bytes / 8; ++at) words(i)[at] = word(seed, i, at);
  }
  // Pieces that differ from what fill() made.
  size_t wrong(uint64_t seed) const {
    size_t count = 0;
    for (size_t i = 0; i < blocks_.size(); ++i) {
      uint64_t at = 0;
      while (at < pieces_[i].bytes / 8 && words(i)[at] == word(seed, i, at)) ++at;
      count += at != pieces_[i].bytes / 8;
    }
    return count;
  }
  int exportPiece(size_t index) const {
    int descriptor = -1;
    const auto type = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    must(softDriver().cuMemExportToShareableHandle(&descriptor, blocks_[index].handle, type, 0));
    return descriptor;
  }
  void release(size_t index) {
    Block& block = blocks_[index];
    if (block.address == 0) return;
    must(softDriver().cuMemUnmap(block.address, pieces_[index].bytes));
    must(softDriver().cuMemAddressFree(block.address, pieces_[index].bytes));
    must(softDriver().cuMemRelease(block.handle));
    block = {};
  }
  bool there(size_t index) const { return blocks_[index].address != 0; }

 private:
  static uint64_t word(uint64_t seed, uint64_t piece, uint64_t at) {
    return (seed << 56 | piece << 40 | at) * 0x9e3779b97f4a7c15;
  }
  struct Block {
    CUmemGenericAllocationHandle handle = 0;
    CUdeviceptr address = 0;
  };
  std::vector<CopierPiece> pieces_;
  std::vector<Block> blocks_;
};

// `count` pieces, most of 2 MiB and some larger, on both devices by turns of three.
inline std::vector<CopierPiece> manyPieces(size_t count) {
  std::vector<CopierPiece> pieces;
  pieces.reserve(count);
  for (size_t i = 0; i < count; ++i)
    pieces.push_back({static_cast<uint32_t>(i / 3 % 2), (i % 8 == 3 ? 3 : 1) * kUnit});
  return pieces;
}

inline CopierLink linkTo(Descriptor socket, std::function<bool()> stopping = [] { return false; }) {
  return CopierLink(std::move(socket), std::move(stopping));
}

inline CopierLink::Export exporting(Memory& memory) {
  return [&memory](size_t index) { return memory.exportPiece(index); };
}
inline CopierLink::Taken releasing(Memory& memory) {
  return [&memory](size_t index) { memory.release(index); };
}

}  // namespace gpupool::server::test
