#include "pool-manager/call_limit.h"

#include <capnp/rpc.capnp.h>

#include "base/log.h"
#include "pool-manager/rpc.h"

namespace gpupool::pool {
namespace {

class LimitedCalls final : public capnp::MessageStream {
 public:
  LimitedCalls(kj::AsyncIoStream& stream, size_t most) : inner_(stream), most_(most) {}

  kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> tryReadMessage(
      kj::ArrayPtr<kj::AutoCloseFd> descriptors, capnp::ReaderOptions options,
      kj::ArrayPtr<capnp::word> scratch) override {
    return inner_.tryReadMessage(descriptors, options, scratch)
        .then([this](kj::Maybe<capnp::MessageReaderAndFds>&& maybe) {
          KJ_IF_MAYBE (message, maybe) {
            count(message->reader->getRoot<capnp::rpc::Message>());
          }
          return kj::mv(maybe);
        });
  }
  kj::Promise<void> writeMessage(kj::ArrayPtr<const int> descriptors,
                                 kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments) override {
    return inner_.writeMessage(descriptors, segments);
  }
  kj::Promise<void> writeMessages(
      kj::ArrayPtr<kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>>> messages) override {
    return inner_.writeMessages(messages);
  }
  kj::Maybe<int> getSendBufferSize() override { return inner_.getSendBufferSize(); }
  kj::Promise<void> end() override { return inner_.end(); }

 private:
  // A Finish of no call, or two calls of one number, end the connection elsewhere: counting is enough.
  void count(capnp::rpc::Message::Reader message) {
    if (message.isFinish() && unfinished_ != 0) --unfinished_;
    if (!message.isCall() && !message.isBootstrap()) return;
    if (++unfinished_ <= most_) return;
    const std::string text =
        "a peer does not finish its calls: " + std::to_string(most_) + " are kept at most";
    GPUPOOL_WARNING("%s; its connection is closed", text.c_str());
    kj::throwFatalException(rpcError(kj::Exception::Type::DISCONNECTED, text));
  }

  capnp::AsyncIoMessageStream inner_;
  size_t most_;
  size_t unfinished_ = 0;
};

}  // namespace

kj::Own<capnp::MessageStream> limitCalls(kj::AsyncIoStream& stream, size_t most) {
  return kj::heap<LimitedCalls>(stream, most);
}

}  // namespace gpupool::pool
