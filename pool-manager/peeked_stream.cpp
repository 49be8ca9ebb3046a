#include "pool-manager/peeked_stream.h"

namespace gpupool::pool {
namespace {

class PeekedStream final : public kj::AsyncIoStream {
 public:
  explicit PeekedStream(kj::Own<kj::AsyncIoStream> inner) : inner_(kj::mv(inner)) {}

  kj::byte& first() { return first_; }
  kj::AsyncIoStream& inner() { return *inner_; }

  kj::Promise<size_t> tryRead(void* buffer, size_t minBytes, size_t maxBytes) override {
    if (told_ || maxBytes == 0) return inner_->tryRead(buffer, minBytes, maxBytes);
    told_ = true;
    *static_cast<kj::byte*>(buffer) = first_;
    if (minBytes <= 1) return size_t{1};
    return inner_->tryRead(static_cast<kj::byte*>(buffer) + 1, minBytes - 1, maxBytes - 1)
        .then([](size_t rest) { return rest + 1; });
  }
  kj::Promise<void> write(const void* buffer, size_t size) override { return inner_->write(buffer, size); }
  kj::Promise<void> write(kj::ArrayPtr<const kj::ArrayPtr<const kj::byte>> pieces) override {
    return inner_->write(pieces);
  }
  kj::Promise<void> whenWriteDisconnected() override { return inner_->whenWriteDisconnected(); }
  void shutdownWrite() override { inner_->shutdownWrite(); }
  void abortRead() override { inner_->abortRead(); }

 private:
  kj::Own<kj::AsyncIoStream> inner_;
  kj::byte first_ = 0;
  bool told_ = false;
};

}  // namespace

kj::Promise<Peeked> peek(kj::Own<kj::AsyncIoStream> stream) {
  auto peeked = kj::heap<PeekedStream>(kj::mv(stream));
  PeekedStream& kept = *peeked;
  return kept.inner().tryRead(&kept.first(), 1, 1).then([peeked = kj::mv(peeked)](size_t size) mutable {
    if (size == 0) return Peeked{};
    const kj::byte first = peeked->first();
    return Peeked{kj::mv(peeked), first};
  });
}

}  // namespace gpupool::pool
