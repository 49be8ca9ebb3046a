#pragma once
// A connection whose peer is the input: it says these bytes and then hangs up. What is written to it is kept.

#include <kj/async-io.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <span>
#include <string>

namespace gpupool::fuzz {

class InputStream final : public kj::AsyncIoStream {
 public:
  explicit InputStream(std::span<const std::byte> bytes) : rest_(bytes) {}

  // Called when everything was read, for more to say; what it returns lives on. None: the end.
  std::function<std::span<const std::byte>(const std::string& written)> more;

  kj::Promise<size_t> tryRead(void* buffer, size_t least, size_t most) override {
    size_t done = 0;
    while (done < least) {
      if (rest_.empty() && more) rest_ = more(written_);
      if (rest_.empty()) break;
      const size_t bytes = std::min(rest_.size(), most - done);
      std::memcpy(static_cast<std::byte*>(buffer) + done, rest_.data(), bytes);
      rest_ = rest_.subspan(bytes);
      done += bytes;
    }
    return done;
  }
  kj::Promise<size_t> read(void* buffer, size_t least, size_t most) override {
    return tryRead(buffer, least, most).then([least](size_t got) -> size_t {
      if (got < least) kj::throwFatalException(KJ_EXCEPTION(DISCONNECTED, "premature end"));
      return got;
    });
  }
  kj::Promise<void> write(const void* data, size_t bytes) override {
    if (written_.size() < kMostKept) written_.append(static_cast<const char*>(data), bytes);
    return kj::READY_NOW;
  }
  kj::Promise<void> write(kj::ArrayPtr<const kj::ArrayPtr<const kj::byte>> pieces) override {
    for (auto piece : pieces)
      if (written_.size() < kMostKept)
        written_.append(reinterpret_cast<const char*>(piece.begin()), piece.size());
    return kj::READY_NOW;
  }
  kj::Promise<void> whenWriteDisconnected() override { return kj::NEVER_DONE; }
  void shutdownWrite() override {}

 private:
  static constexpr size_t kMostKept = 64 << 10;
  std::span<const std::byte> rest_;
  std::string written_;
};

// The process's event loop.
inline kj::AsyncIoContext& eventLoop() {
  static auto* io = new kj::AsyncIoContext(kj::setupAsyncIo());
  return *io;
}

}  // namespace gpupool::fuzz
