#pragma once
// What the server's tests share: a folder that goes away, grants to hand out, the holder's side of the
// handshake.

#include <capnp/message.h>
#include <capnp/serialize-async.h>
#include <capnp/serialize.h>
#include <kj/async-io.h>
#include <kj/io.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "schema/convert.h"
#include "schema/handshake.h"
#include "schema/pool.capnp.h"
#include "schema/session.capnp.h"
#include "server/front/leases.h"

namespace gpupool::server::test {

inline constexpr uint64_t kRows = 0x1234;  // fake_worker.cpp's
inline constexpr uint64_t kOtherRows = 0x5678;
inline constexpr const char* kServer = "node1";
inline constexpr uint64_t kGiB = uint64_t{1} << 30;

class Folder {
 public:
  Folder() {
    char name[] = "/tmp/gpupool-test-XXXXXX";
    if (mkdtemp(name) == nullptr) abort();
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path;
};

// A worker program in `folder` that is the fake worker with kOtherRows; its path.
inline std::string makeOtherWorker(const std::string& folder, const std::string& fakeWorker) {
  const std::string path = folder + "/gpupool-worker-0.0.8";
  std::ofstream(path) << "#!/bin/sh\nGPUPOOL_FAKE_ROWS=5678 exec '" << fakeWorker << "' \"$@\"\n";
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return path;
}

struct Environment {
  Environment(const char* name, const std::string& value) : name(name), value(value) {
    setenv(name, value.c_str(), 1);
  }
  ~Environment() { unsetenv(name); }
  const char* name;
  std::string value;
};

inline bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// What the exception that `action` throws says; "" if it throws none.
template <class Action>
std::string failure(Action action) {
  try {
    action();
  } catch (const kj::Exception& exception) {
    return exception.getDescription().cStr();
  } catch (const std::exception& exception) {
    return exception.what();
  }
  return "";
}

inline std::string uuid(int device) {
  return std::string(16, static_cast<char>(0x40 + device));
}  // fake_driver.cpp's

inline std::vector<Device> twoDevices() {
  return {{uuid(0), "Fake GPU 0", 8 * kGiB, 9, 0, "", 0, false, 13000},
          {uuid(1), "Fake GPU 1", 8 * kGiB, 9, 0, "", 1, false, 13000}};
}

inline const std::string kKey(32, 'k');

// memory 0: the whole device.
inline void fillLease(schema::Lease::Builder lease, Id id, uint64_t epoch, std::vector<int> devices,
                      uint64_t memory = kGiB, const std::string& key = kKey,
                      const std::string& tenant = "tenant") {
  schema::write(id, lease.initId());
  lease.setDeviceEpoch(epoch);
  lease.setSessionKey(kj::arrayPtr(reinterpret_cast<const kj::byte*>(key.data()), key.size()));
  lease.setHolder("tester");
  lease.setTenant(tenant);
  auto list = lease.initDevices(static_cast<unsigned>(devices.size()));
  for (unsigned i = 0; i < list.size(); ++i) {
    const std::string name = uuid(devices[i]);
    list[i].initInfo().setUuid(kj::arrayPtr(reinterpret_cast<const kj::byte*>(name.data()), name.size()));
    list[i].setMemoryBytes(memory);
  }
}

// Why the table refuses; "": it does not.
inline std::string grant(LeaseTable& table, Id id, uint64_t epoch, std::vector<int> devices,
                         uint64_t memory = kGiB, const std::string& key = kKey) {
  capnp::MallocMessageBuilder message;
  fillLease(message.initRoot<schema::Lease>(), id, epoch, std::move(devices), memory, key);
  return table.grant(message.getRoot<schema::Lease>().asReader()).value_or("");
}
inline std::string addTarget(LeaseTable& table, Id id, uint64_t epoch, std::vector<int> devices,
                             uint64_t memory = kGiB) {
  capnp::MallocMessageBuilder message;
  fillLease(message.initRoot<schema::Lease>(), id, epoch, std::move(devices), memory);
  return table.addTarget(message.getRoot<schema::Lease>().asReader()).value_or("");
}

// The holder's side, with everything that a test may want to get wrong.
struct Opening {
  Id lease{1, 1};
  Id session{2, 2};
  uint64_t epoch = 1;
  uint32_t protocol = schema::PROTOCOL_VERSION;
  uint32_t oldest = 0;
  uint64_t rowsHash = kRows;
  std::string release;
  std::string key = kKey;
  std::string transport = "shm";
  std::string nonce = std::string(32, 'n');
  std::string command = "test";
  std::string server = kServer;
  bool arrives = false;
  bool transportNamed = false;

  std::string error;          // what the server said; empty: the session is open
  bool unknownLease = false;  // this and otherVersion: it said so
  bool otherVersion = false;
  uint32_t answered = 0;  // this and answeredRows: its protocol and its rows
  uint64_t answeredRows = 0;
  bool serverProved = false;  // its proof was right
  bool suspended = false;     // refused for now, because the lease is suspended
  kj::Own<kj::AsyncIoStream> stream;

  kj::Promise<void> run(kj::Own<kj::AsyncIoStream> connection) {
    stream = kj::mv(connection);
    capnp::MallocMessageBuilder message;
    auto hello = message.initRoot<schema::SessionHello>();
    hello.setProtocol(protocol);
    hello.setOldest(oldest);
    hello.setRowsHash(rowsHash);
    hello.setRelease(release);
    schema::write(lease, hello.initLease());
    schema::write(session, hello.initSession());
    hello.setEpoch(epoch);
    hello.setClientNonce(kj::arrayPtr(reinterpret_cast<const kj::byte*>(nonce.data()), nonce.size()));
    hello.setTransport(transport);
    hello.setPid(static_cast<uint32_t>(getpid()));
    hello.setCommand(command);
    hello.setArrives(arrives);
    hello.setTransportNamed(transportNamed);
    auto sent = send(message);
    return sent.then([this] { return capnp::readMessage(*stream); })
        .then([this](kj::Own<capnp::MessageReader> reply) {
          return prove(reply->getRoot<schema::SessionChallenge>());
        });
  }

  kj::Promise<void> prove(schema::SessionChallenge::Reader challenge) {
    error = challenge.getError().cStr();
    unknownLease = challenge.getUnknownLease();
    otherVersion = challenge.getOtherVersion();
    answered = challenge.getProtocol();
    answeredRows = challenge.getRowsHash();
    if (!error.empty()) return kj::READY_NOW;
    const auto serverNonce = challenge.getServerNonce();
    const schema::HandshakeFacts facts{
        session.high,
        session.low,
        epoch,
        std::as_bytes(std::span(nonce)),
        std::span(reinterpret_cast<const std::byte*>(serverNonce.begin()), serverNonce.size()),
        server};
    const auto secret = std::as_bytes(std::span(key));
    const auto proof = challenge.getProof();
    serverProved =
        equalConstantTime(std::span(reinterpret_cast<const std::byte*>(proof.begin()), proof.size()),
                          schema::handshakeProof(secret, schema::kRoleServer, facts));
    const Digest mine = schema::handshakeProof(secret, schema::kRoleHolder, facts);
    capnp::MallocMessageBuilder message;
    message.initRoot<schema::SessionProof>().setProof(
        kj::arrayPtr(reinterpret_cast<const kj::byte*>(mine.data()), mine.size()));
    return send(message)
        .then([this] { return capnp::readMessage(*stream); })
        .then([this](kj::Own<capnp::MessageReader> reply) {
          const auto answer = reply->getRoot<schema::SessionAnswer>();
          error = answer.getOk() ? "" : answer.getError().cStr();
          suspended = answer.getSuspended();
        });
  }

  kj::Promise<void> send(capnp::MessageBuilder& message) {
    auto words = capnp::messageToFlatArray(message);
    auto write = stream->write(words.asBytes().begin(), words.asBytes().size());
    return write.attach(kj::mv(words));
  }

  // Tells the fake worker what to do, and reads what it says: "" at end-of-file.
  kj::Promise<std::string> order(char letter) {
    auto text = kj::heapArray<char>(1);
    text[0] = letter;
    auto write = stream->write(text.begin(), 1);
    return write.attach(kj::mv(text)).then([this] { return hear(); });
  }
  kj::Promise<std::string> hear() {
    auto buffer = kj::heapArray<char>(256);
    auto read = stream->tryRead(buffer.begin(), 1, buffer.size());
    return read.then([buffer = kj::mv(buffer)](size_t bytes) { return std::string(buffer.begin(), bytes); },
                     [](kj::Exception&&) { return std::string(); });
  }
};

// The two ends of a Unix connection.
inline std::pair<kj::Own<kj::AsyncIoStream>, kj::Own<kj::AsyncIoStream>> connection(
    kj::LowLevelAsyncIoProvider& io) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) abort();
  return {io.wrapSocketFd(kj::AutoCloseFd(ends[0])), io.wrapSocketFd(kj::AutoCloseFd(ends[1]))};
}

// Resolves when the condition holds; rejects after half a minute.
inline kj::Promise<void> eventually(kj::Timer& timer, std::function<bool()> condition, int attempts = 3000) {
  if (condition()) return kj::READY_NOW;
  if (attempts == 0) return KJ_EXCEPTION(FAILED, "it did not happen in half a minute");
  return timer.afterDelay(10 * kj::MILLISECONDS)
      .then([&timer, condition = std::move(condition), attempts]() mutable {
        return eventually(timer, std::move(condition), attempts - 1);
      });
}

// Running: neither gone nor waiting to be reaped.
inline bool alive(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name = line.rfind(')');
  if (name == std::string::npos || line.size() <= name + 2 || line[name + 2] == 'X') return false;
  if (line[name + 2] != 'Z') return true;
  // Its other threads may be ending still, and have its files open.
  std::error_code gone;
  const std::filesystem::directory_iterator tasks("/proc/" + std::to_string(pid) + "/task", gone);
  return !gone && std::distance(begin(tasks), end(tasks)) > 1;
}

// The running processes that `parent` started.
inline std::vector<pid_t> children(pid_t parent = getpid()) {
  std::ifstream file("/proc/" + std::to_string(parent) + "/task/" + std::to_string(parent) + "/children");
  std::vector<pid_t> list;
  for (pid_t pid; file >> pid;)
    if (alive(pid)) list.push_back(pid);
  return list;
}

}  // namespace gpupool::server::test
