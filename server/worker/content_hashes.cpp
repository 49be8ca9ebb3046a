#include "server/worker/content_hashes.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "server/worker/page_layout.h"

namespace gpupool::server {
namespace {

// One for each page of a thread's share: neighbours belong to different threads.
struct HostPage {
  std::span<const std::byte> bytes;
  Checksum* hash = nullptr;
};

size_t hostThreads() { return std::clamp<size_t>(std::thread::hardware_concurrency() / 2, 1, 4); }

}  // namespace

ContentHashes::~ContentHashes() { finish(); }

std::string ContentHashes::begin(std::span<const std::span<const std::byte>> host) {
  beginHost(host);
  return beginDevice();
}

void ContentHashes::beginHost(std::span<const std::span<const std::byte>> contents) {
  host_.resize(contents.size());
  std::vector<HostPage> pages;
  for (size_t i = 0; i < contents.size(); ++i) {
    if (contents[i].size() < kPageBytes) continue;
    host_[i].resize((contents[i].size() + kPageBytes - 1) / kPageBytes);
    std::span<const std::byte> rest = contents[i];
    for (Checksum& hash : host_[i]) {
      const auto page = rest.first(std::min<size_t>(kPageBytes, rest.size()));
      pages.push_back({page, &hash});
      rest = rest.subspan(page.size());
    }
  }
  const size_t threads = std::min(hostThreads(), pages.size());
  for (size_t first = 0; first < threads; ++first)
    threads_.push_back(beside([first, threads, pages] {
      for (size_t i = first; i < pages.size(); i += threads) *pages[i].hash = checksumOf(pages[i].bytes);
      return std::string();
    }));
}

// Pieces whose addresses stay are hashed without waiting for each.
std::string ContentHashes::beginDevice() {
  device_.resize(pieces_.bytes() / kPageBytes);
  std::span<Checksum> rest(device_);
  for (size_t piece = 0; piece < pieces_.all().size(); ++piece) {
    const size_t pages = pieces_.all()[piece].bytes / kPageBytes;
    if (std::string why = beginPiece(piece, rest.first(pages)); !why.empty()) return why;
    rest = rest.subspan(pages);
  }
  return "";
}

std::string ContentHashes::beginPiece(size_t piece, std::span<Checksum> hashes) {
  CUdeviceptr address = 0;
  if (std::string why = pieces_.open(piece, address); !why.empty()) return why;
  const CUcontext context = pieces_.context(pieces_.all()[piece].device);
  PageHasher* hasher = session_.hashers().find(context);
  if (hasher == nullptr) return hashThroughHost(address, hashes);
  hashing_[context] = hasher;
  const CUresult result = hasher->begin(address, hashes);
  if (result != CUDA_SUCCESS) return pieces_.failed("hashing it", result);
  return pieces_.stays() ? "" : finishDevice();
}

// Where the device does not.
std::string ContentHashes::hashThroughHost(CUdeviceptr address, std::span<Checksum> hashes) {
  std::vector<std::byte> page(kPageBytes);
  for (Checksum& hash : hashes) {
    const CUresult result = session_.driver().cuMemcpyDtoH_v2(page.data(), address, page.size());
    if (result != CUDA_SUCCESS) return pieces_.failed("cuMemcpyDtoH", result);
    hash = checksumOf(page);
    address += kPageBytes;
  }
  return "";
}

std::string ContentHashes::finishDevice() {
  std::string why;
  for (const auto& [context, hasher] : std::exchange(hashing_, {})) {
    CUresult result = session_.driver().cuCtxSetCurrent(context);
    if (result == CUDA_SUCCESS) result = hasher->finish();
    if (result != CUDA_SUCCESS && why.empty()) why = pieces_.failed("hashing it", result);
  }
  return why;
}

std::string ContentHashes::finish() {
  std::string why = finishDevice();
  for (std::future<std::string>& thread : std::exchange(threads_, {})) thread.get();
  return why;
}

}  // namespace gpupool::server
