#include "pool-manager/patient_stream.h"

#include <kj/vector.h>

namespace gpupool::pool {
namespace {

class PatientStream final : public kj::AsyncIoStream {
 public:
  explicit PatientStream(kj::Own<kj::AsyncIoStream> inner) : inner_(kj::mv(inner)) {}

  kj::Promise<size_t> tryRead(void* buffer, size_t minBytes, size_t maxBytes) override {
    if (writing_ == 0) return inner_->tryRead(buffer, minBytes, maxBytes);
    auto written = kj::newPromiseAndFulfiller<void>();
    readers_.add(kj::mv(written.fulfiller));
    return written.promise.then(
        [this, buffer, minBytes, maxBytes]() { return tryRead(buffer, minBytes, maxBytes); });
  }
  kj::Promise<void> write(const void* buffer, size_t size) override {
    return counted([&]() { return inner_->write(buffer, size); });
  }
  kj::Promise<void> write(kj::ArrayPtr<const kj::ArrayPtr<const kj::byte>> pieces) override {
    return counted([&]() { return inner_->write(pieces); });
  }
  kj::Promise<void> whenWriteDisconnected() override { return inner_->whenWriteDisconnected(); }
  void shutdownWrite() override { inner_->shutdownWrite(); }
  void abortRead() override { inner_->abortRead(); }
  kj::Maybe<int> getFd() const override { return inner_->getFd(); }

 private:
  // Also when the write fails or is given up: the reader then learns what became of the connection.
  template <class Write>
  kj::Promise<void> counted(Write&& write) {
    ++writing_;
    auto over = kj::defer([this]() {
      if (--writing_ != 0) return;
      for (auto& reader : readers_) reader->fulfill();
      readers_.clear();
    });
    return write().attach(kj::mv(over));
  }

  kj::Own<kj::AsyncIoStream> inner_;
  size_t writing_ = 0;
  kj::Vector<kj::Own<kj::PromiseFulfiller<void>>> readers_;
};

}  // namespace

kj::Own<kj::AsyncIoStream> patientStream(kj::Own<kj::AsyncIoStream> inner) {
  return kj::heap<PatientStream>(kj::mv(inner));
}

}  // namespace gpupool::pool
