#include "base/content.h"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace gpupool {
namespace {

constexpr size_t kPartsPerThread = 4;  // fewer are hashed before a thread has started
constexpr size_t kMostThreads = 4;

// False: there is no further thread to be had.
template <class Work>
bool start(std::vector<std::thread>& threads, const Work& work) {
  try {
    threads.emplace_back(work);
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

// On this thread and `others` more. Threads that cannot be had are done without.
template <class Work>
void onThreads(size_t others, Work work) {
  std::vector<std::thread> threads;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (threads.size() < others && start(threads, work)) {
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  work();
  for (auto& thread : threads) thread.join();
}

}  // namespace

Digest contentDigest(std::span<const std::byte> bytes) {
  if (bytes.size() <= kContentPart) return sha256(bytes);
  const size_t count = (bytes.size() + kContentPart - 1) / kContentPart;
  std::vector<Digest> parts(count);
  std::atomic<size_t> next{0};
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  onThreads(std::min({count / kPartsPerThread, cores - 1, kMostThreads - 1}), [&] {
    for (size_t i; (i = next.fetch_add(1)) < count;)
      parts[i] =
          sha256(bytes.subspan(i * kContentPart, std::min(kContentPart, bytes.size() - i * kContentPart)));
  });
  return sha256(std::as_bytes(std::span(parts)));
}

void ContentHash::update(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    if (filled_ == kContentPart) {  // not before more comes: the last part may be the only one
      parts_.update(part_.finish());
      part_ = Sha256();
      filled_ = 0;
      many_ = true;
    }
    const size_t taken = std::min(bytes.size(), kContentPart - filled_);
    part_.update(bytes.first(taken));
    bytes = bytes.subspan(taken);
    filled_ += taken;
  }
}

Digest ContentHash::finish() {
  const Digest last = part_.finish();
  if (!many_) return last;
  parts_.update(last);
  return parts_.finish();
}

}  // namespace gpupool
