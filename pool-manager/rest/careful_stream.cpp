#include "pool-manager/rest/careful_stream.h"

namespace gpupool::pool::rest {
namespace {

class CarefulStream final : public kj::AsyncIoStream {
 public:
  CarefulStream(kj::Own<kj::AsyncIoStream> inner, kj::Timer& timer, kj::Duration limit)
      : inner_(kj::mv(inner)), timer_(timer), limit_(limit) {}

  kj::Promise<size_t> tryRead(void* buffer, size_t minBytes, size_t maxBytes) override {
    return inner_->tryRead(buffer, minBytes, maxBytes);
  }
  kj::Promise<void> write(const void* buffer, size_t size) override {
    return timer_.timeoutAfter(limit_, inner_->write(buffer, size));
  }
  kj::Promise<void> write(kj::ArrayPtr<const kj::ArrayPtr<const kj::byte>> pieces) override {
    return timer_.timeoutAfter(limit_, inner_->write(pieces));
  }
  kj::Promise<void> whenWriteDisconnected() override { return inner_->whenWriteDisconnected(); }
  void shutdownWrite() override { inner_->shutdownWrite(); }
  void abortRead() override { inner_->abortRead(); }
  kj::Maybe<int> getFd() const override { return inner_->getFd(); }

 private:
  kj::Own<kj::AsyncIoStream> inner_;
  kj::Timer& timer_;
  kj::Duration limit_;
};

}  // namespace

kj::Own<kj::AsyncIoStream> carefulStream(kj::Own<kj::AsyncIoStream> inner, kj::Timer& timer,
                                         kj::Duration limit) {
  return kj::heap<CarefulStream>(kj::mv(inner), timer, limit);
}

}  // namespace gpupool::pool::rest
