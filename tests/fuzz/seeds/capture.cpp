// Linked into a worker instead of transport::accept: every message of the session is written down as it
// passes, one file a session in $GPUPOOL_CAPTURE. tests/fuzz/seeds/make makes seeds of them.
//
// A file: messages {u8 direction (0: from the client), u8 channel, u32 bytes, bytes}. So that a session can
// be had again: the client is made to offer the last address space alone, and addresses of the worker's
// staging memory are written as if it lay at kStaging.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "schema/hello.h"
#include "transports/transport.h"

namespace gpupool::transport {
namespace {

constexpr uint64_t kStaging = 0x2ff0'0000'0000, kStagingBytes = 1 << 20;

class Recorder final : public Connection {
 public:
  explicit Recorder(std::unique_ptr<Connection> inner) : inner_(std::move(inner)) {
    const char* folder = std::getenv("GPUPOOL_CAPTURE");
    if (folder != nullptr)
      file_ = std::fopen((std::string(folder) + "/" + std::to_string(getpid())).c_str(), "w");
  }
  std::byte* reserve(Channel channel, size_t bytes, Deadline deadline) override {
    return reserved_[static_cast<int>(channel)] = inner_->reserve(channel, bytes, deadline);
  }
  void commit(Channel channel, size_t bytes) override {
    std::vector<std::byte> message(reserved_[static_cast<int>(channel)],
                                   reserved_[static_cast<int>(channel)] + bytes);
    if (bytes == sizeof(schema::WorkerHello)) {
      schema::WorkerHello hello;
      std::memcpy(&hello, message.data(), sizeof hello);
      staging_ = hello.stagingAddress;
    }
    keep(1, channel, message);
    inner_->commit(channel, bytes);
  }
  std::span<const std::byte> receive(Channel channel, Deadline deadline) override {
    auto message = inner_->receive(channel, deadline);
    if (message.empty()) return message;
    if (channel == Channel::call && !greeted_ && message.size() == sizeof(schema::ClientHello)) {
      greeted_ = true;
      hello_.assign(message.begin(), message.end());
      auto* hello = reinterpret_cast<schema::ClientHello*>(hello_.data());
      hello->spaces = 1u << (schema::kMaxSpaces - 1);
      message = hello_;
    }
    keep(0, channel, {message.begin(), message.end()});
    return message;
  }
  bool pending(Channel channel) override { return inner_->pending(channel); }
  size_t maxMessage(Channel channel) const override { return inner_->maxMessage(channel); }
  Region share(std::shared_ptr<SharedMemory> memory) override { return inner_->share(std::move(memory)); }
  void unshare(Region region) override { inner_->unshare(region); }
  std::shared_ptr<SharedMemory> map(Region remote, void* at, Deadline deadline) override {
    return inner_->map(remote, at, deadline);
  }
  bool mapsMemory() const override { return inner_->mapsMemory(); }
  Transfer put(const void* local, Region remote, uint64_t offset, size_t bytes) override {
    return inner_->put(local, remote, offset, bytes);
  }
  Transfer get(void* local, Region remote, uint64_t offset, size_t bytes) override {
    return inner_->get(local, remote, offset, bytes);
  }
  bool wait(Transfer transfer, Deadline deadline) override { return inner_->wait(transfer, deadline); }
  Peer peer() const override { return inner_->peer(); }
  std::string reason() const override { return inner_->reason(); }
  int wakeupDescriptor() const override { return inner_->wakeupDescriptor(); }
  void close() override { inner_->close(); }
  void abandon() override { inner_->abandon(); }
  const char* name() const override { return inner_->name(); }

 private:
  void keep(uint8_t direction, Channel channel, std::vector<std::byte> message) {
    std::lock_guard lock(mutex_);
    if (file_ == nullptr) return;
    for (size_t at = 0; at + 8 <= message.size(); at += 8) {
      uint64_t word;
      std::memcpy(&word, message.data() + at, sizeof word);
      if (staging_ == 0 || word < staging_ || word - staging_ >= (uint64_t{64} << 20)) continue;
      word = kStaging + (word - staging_) % kStagingBytes / 2;
      std::memcpy(message.data() + at, &word, sizeof word);
    }
    const auto bytes = static_cast<uint32_t>(message.size());
    const uint8_t head[] = {direction, static_cast<uint8_t>(channel)};
    std::fwrite(head, 1, sizeof head, file_);
    std::fwrite(&bytes, 1, sizeof bytes, file_);
    std::fwrite(message.data(), 1, message.size(), file_);
    std::fflush(file_);
  }

  std::unique_ptr<Connection> inner_;
  std::byte* reserved_[kChannels] = {};
  std::vector<std::byte> hello_;
  bool greeted_ = false;
  uint64_t staging_ = 0;
  std::mutex mutex_;
  std::FILE* file_ = nullptr;
};

}  // namespace

// The linker calls accept by this name, and this by accept's.
std::unique_ptr<Connection>
realAccept(const std::string& transport, int bootstrap, const Options& options) asm(
    "__real__ZN7gpupool9transport6acceptERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEiRKNS0_"
    "7OptionsE");
std::unique_ptr<Connection>
recordingAccept(const std::string& transport, int bootstrap, const Options& options) asm(
    "__wrap__ZN7gpupool9transport6acceptERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEiRKNS0_"
    "7OptionsE");
std::unique_ptr<Connection> recordingAccept(const std::string& transport, int bootstrap,
                                            const Options& options) {
  return std::make_unique<Recorder>(realAccept(transport, bootstrap, options));
}

}  // namespace gpupool::transport
