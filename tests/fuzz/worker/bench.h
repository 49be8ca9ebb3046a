#pragma once
// One session of a worker over the fake driver, without its threads: messages go in one after the other,
// replies and notices are counted and forgotten.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "server/worker/dispatch.h"
#include "server/worker/session.h"

namespace gpupool::server {

// What Session's threads would do.
struct SessionSeam {
  static bool greet(Session& session, std::string& reason) { return session.greet(reason); }
  // False: the session is over.
  static bool frame(Session& session, std::span<const std::byte> message, std::string& reason);
  static bool control(Session& session, std::span<const std::byte> message) {
    return session.control(message);
  }
  static uint64_t nextSeq(Session& session, bool aside) {
    return aside ? schema::kAside | (session.asides_ + 1) : session.lastSeq_ + 1;
  }
  // A thread remembers which context is current, and serves one session; here it serves many.
  static void forgetContext(Session& session) {
    static uint64_t ended = 0;
    session.contextsEnded_ = ended += 1 << 20;
  }
};

}  // namespace gpupool::server

namespace gpupool::fuzz {

inline constexpr uint64_t kEpoch = 1;
inline constexpr uint64_t kStagingAddress = 0x2ff0'0000'0000;

// The wire of one session: hands over what is queued.
class Wire final : public transport::Connection {
 public:
  explicit Wire(bool mapsMemory) : mapsMemory_(mapsMemory) {}

  std::optional<std::span<const std::byte>> next;  // what the next receive gives

  std::byte* reserve(transport::Channel, size_t bytes, transport::Deadline) override;
  void commit(transport::Channel, size_t bytes) override;
  std::span<const std::byte> receive(transport::Channel, transport::Deadline) override;
  bool pending(transport::Channel) override { return next.has_value(); }
  size_t maxMessage(transport::Channel channel) const override {
    return channel == transport::Channel::call ? (size_t{2} << 20) - 8 : (size_t{128} << 10) - 8;
  }
  transport::Region share(std::shared_ptr<transport::SharedMemory>) override { return {++regions_, 1}; }
  void unshare(transport::Region) override {}
  std::shared_ptr<transport::SharedMemory> map(transport::Region, void*, transport::Deadline) override {
    return nullptr;
  }
  bool mapsMemory() const override { return mapsMemory_; }
  transport::Transfer put(const void* local, transport::Region remote, uint64_t, size_t bytes) override;
  transport::Transfer get(void*, transport::Region, uint64_t, size_t) override { return transport::kRefused; }
  bool wait(transport::Transfer transfer, transport::Deadline) override { return transfer == 0; }
  transport::Peer peer() const override { return over_ ? transport::Peer::closed : transport::Peer::alive; }
  std::string reason() const override { return ""; }
  int wakeupDescriptor() const override { return -1; }
  void close() override {}
  void abandon() override {}
  const char* name() const override { return "fuzz"; }

 private:
  bool mapsMemory_;
  bool over_ = false;
  uint32_t regions_ = 0;
  // By channel, for words are told on a thread of their own; another for each message, so that what is
  // written beyond one is seen.
  std::unique_ptr<std::byte[]> out_[transport::kChannels];
};

class Bench {
 public:
  // network: client and worker share no memory. seed: of the driver's answers.
  Bench(bool network, uint64_t seed);
  ~Bench();

  // The client's greeting; false: it was refused.
  bool greet(std::span<const std::byte> hello);
  bool greet();  // a good one
  // A few objects of every kind, by the names that a client gives its first ones.
  void mintObjects();
  bool frame(std::span<const std::byte> message) {
    return server::SessionSeam::frame(*session, message, reason);
  }
  bool control(std::span<const std::byte> message) { return server::SessionSeam::control(*session, message); }

  std::unique_ptr<server::Session> session;
  std::string reason;  // why the session ended

 private:
  Wire* wire_;
};

}  // namespace gpupool::fuzz
