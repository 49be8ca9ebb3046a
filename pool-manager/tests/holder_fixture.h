#pragma once
// The holder between an application and the pool, all on one event loop: a Service, a server that speaks the
// handshake, and a socket as the client library would hold it.

#include "pool-manager/cli/holder.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "base/descriptor_passing.h"
#include "catch.h"
#include "fake_server.h"
#include "pool-manager/cli/holder_process.h"
#include "pool-manager/convert.h"
#include "pool-manager/service.h"
#include "serve_at.h"
#include "support.h"

namespace gpupool::test {

using namespace gpupool::cli;
using namespace gpupool::pool;
using holder::OpenReply;
using holder::OpenRequest;
using holder::Status;

struct Opened {
  OpenReply reply;
  kj::AutoCloseFd session;
  bool answered = false;
};

inline bool connectTo(int socket, const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  return ::connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
}

struct Fixture {
  Fixture()
      : io(kj::setupAsyncIo()),
        store(makeMemoryStore()),
        address("unix:" + folder.path + "/manager"),
        server(kj::heap<FakeServer>(io, "a", 2, folder.path + "/server")) {
    settings.addresses = {address};
    settings.request.holder = "tester";
    settings.request.ttlMs = 1000;
    settings.connectLimit = 500 * kj::MILLISECONDS;
    settings.sessionLimit = 500 * kj::MILLISECONDS;
    settings.restartLimit = 0 * kj::SECONDS;
  }
  void startManager() {
    PoolTimes times;
    times.beatMs = beatMs;
    ServiceLimits limits;
    limits.tick = 10 * kj::MILLISECONDS;
    limits.call = callLimit;
    service = kj::heap<Service>(io.provider->getTimer(), *store, times, limits, bootTimeMs);
    housekeeping = serveAt(io, *service, folder.path + "/manager");
  }
  void stopManager() {
    housekeeping = nullptr;
    service = nullptr;
  }
  void startAll() {
    startManager();
    server->join(address);
    server->joined().wait(io.waitScope);
  }
  void makeHolder() {
    holder = kj::heap<Holder>(
        *io.provider, io.unixEventPort, settings,
        [this](const std::string& why, bool told) { lost = why + (told ? " (told)" : ""); },
        [this](const std::string& text) { news.push_back(text); });
    int pair[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    application = kj::AutoCloseFd(pair[0]);
    serving = holder->serve(kj::AutoCloseFd(pair[1])).eagerlyEvaluate(nullptr);
  }
  void pause(unsigned ms) { io.provider->getTimer().afterDelay(ms * kj::MILLISECONDS).wait(io.waitScope); }

  // Sends as the client library would, and pumps the loop until the reply is there.
  Opened open(OpenRequest request) { return send(&request, sizeof request); }
  Opened send(const void* data, size_t size) {
    REQUIRE(::send(application, data, size, 0) == static_cast<ssize_t>(size));
    Opened opened;
    for (int i = 0; i < 300 && !opened.answered; ++i) {
      pause(10);
      receive(opened);
    }
    return opened;
  }
  void receive(Opened& opened) {
    const auto received = receiveWithDescriptors(
        application, std::as_writable_bytes(std::span(&opened.reply, 1)), MSG_DONTWAIT);
    if (received.bytes < 0) return;
    CHECK(received.bytes == sizeof opened.reply);
    opened.answered = true;
    if (!received.descriptors.empty()) opened.session = kj::AutoCloseFd(received.descriptors[0]);
  }
  static OpenRequest request(uint64_t rows = 0x1234) {
    OpenRequest one;
    one.rowsHash = rows;
    one.pid = ::getpid();
    std::strcpy(one.command, "test");
    return one;
  }

  Folder folder;
  kj::AsyncIoContext io;
  std::unique_ptr<Store> store;
  std::string address, lost;
  std::vector<std::string> news;  // for people
  uint32_t beatMs = 100;
  kj::Duration callLimit = 500 * kj::MILLISECONDS;
  kj::Own<FakeServer> server;
  kj::Own<Service> service;
  kj::Promise<void> housekeeping = nullptr;
  HolderSettings settings;
  kj::Own<Holder> holder;
  kj::AutoCloseFd application;
  kj::Promise<void> serving = nullptr;
};

}  // namespace gpupool::test
