// gpupool-worker: one process per session, started ahead of time by gpupool-server with cuInit done and used
// once. The server hands it a client's socket; from then on it talks to that client alone. A crash, a fault
// or a leak ends this process and with it this session only. `--inventory` lists the driver's devices for the
// server and exits; `--identify` says what this program is (server/worker_interface.h); with `--copier` the
// process is the server's copier (server/copier/copier.h).

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/log.h"
#include "base/transport_names.h"
#include "schema/frame.h"
#include "schema/protocol.h"
#include "schema/rows.h"
#include "server/copier/copier.h"
#include "server/driver.h"
#include "server/host_room.h"
#include "server/walls/walls.h"
#include "server/worker/activity_watch.h"
#include "server/worker/count_watch.h"
#include "server/worker/disturbance.h"
#include "server/worker/hindrances.h"
#include "server/worker/loss.h"
#include "server/worker/rebuild.h"
#include "server/worker/server_account.h"
#include "server/worker/session.h"
#include "server/worker/suspender.h"
#include "server/worker_interface.h"
#include "server/worker_process.h"
#include "transports/waiting.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

using namespace gpupool;

namespace {

constexpr std::chrono::hours kForEver{24 * 365};
constexpr std::chrono::seconds kLookAtStream{1};
// The old worker may die in the moment in which the client is on its way from its holder to this server.
constexpr std::chrono::seconds kClientsLastTime{60};

// In AddressSanitizer's builds: ends the process if memory was leaked. What the session still owns is not
// leaked.
void checkLeaks() {
#ifdef __SANITIZE_ADDRESS__
  __lsan_do_leak_check();
#endif
}

std::unique_ptr<transport::Connection> connect(const server::WorkerArguments& arguments,
                                               const server::SessionStart& start,
                                               const std::string& transport, int socket) {
  transport::Options options;
  options.networkDevice = start.networkDevice;
  options.wire = transport::wireNamed(start.networkWire.empty() ? "auto" : start.networkWire);
  // A client may be stopped at any time, and for as long as somebody likes: in a debugger, from the terminal.
  options.stallTimeout = arguments.clientStallTime.count() != 0 ? arguments.clientStallTime : kForEver;
  options.setupTimeout = std::max(options.setupTimeout, options.stallTimeout);
  return transport::accept(transport, socket, options);
}

bool sharesMemory(const std::string& transport) {
  const TransportFacts* facts = findTransport(transport);
  return facts == nullptr || facts->reach == TransportFacts::Reach::sameHost;
}

// stream: to the worker of another server that the session leaves. When that one is gone, or goes on with the
// session, a client that has not come does not come: nobody here has heard it say so. files: to this one's
// server, whose next life may bring the client.
std::optional<int> waitForClient(server::WorkerProcess& process, const server::StateSocket* stream,
                                 bool files) {
  if (stream == nullptr) return process.waitForClient(kForEver);
  const auto mayCome = [&] {
    return !process.stopping() && (!stream->ended() || (files && process.outlivesServer()));
  };
  while (true) {
    while (mayCome())
      if (const auto client = process.waitForClient(kLookAtStream)) return client;
    const auto client = process.waitForClient(kClientsLastTime);
    if (client || !mayCome()) return client;
  }
}

// The first context, which the session began with if `ahead` says so: 1 + the device by index, or 0.
std::string makeFirstContext(const server::Driver& driver, const server::SessionStart& start, unsigned ahead,
                             server::HostPages& own) {
  if (own.registeredIn != nullptr || ahead > start.devices.size())
    return "the worker's first context is not the session's";
  if (ahead == 0) return "";
  CUcontext context = server::contextAhead(driver, start.ordinal(ahead - 1));
  server::registerHostPages(driver, context, own);
  return "";
}

// A worker of this server tells what the first context is and goes on working until it is there: to make one
// takes a driver some tenths of a second, and on a machine of several GPUs more than one.
std::string receiveHere(const server::Driver& driver, const server::SessionStart& start,
                        server::StateSocket& state, server::Rebuild& rebuild, server::HostPages& pages) {
  server::HostPages own = pages;
  uint32_t ahead = 0;
  if (!state.receive(std::as_writable_bytes(std::span(&ahead, 1)))) return state.error();
  if (std::string why = makeFirstContext(driver, start, ahead, own); !why.empty()) return why;
  if (!state.answer("")) return state.error();
  if (std::string why = rebuild.receive(pages); !why.empty()) return why;
  if (rebuild.contextAhead() != ahead) return "the other worker's record is damaged";
  if (ahead != 0) server::exchangeHostPages(driver, own, pages);
  return "";
}

// What the session left on its old server. This worker has no context: it makes the one that the session
// began with.
std::string receive(const server::Driver& driver, const server::SessionStart& start,
                    server::StateSocket& state, server::Rebuild& rebuild, server::HostPages& pages) {
  if (!start.stream) return receiveHere(driver, start, state, rebuild, pages);
  if (std::string why = rebuild.receive(pages); !why.empty() || rebuild.beginsAnew()) return why;
  return makeFirstContext(driver, start, rebuild.contextAhead(), pages);
}

// The numbers in it are the server's, and a GPU that is not here would end the list: what is here is all to
// be seen. A partition of a GPU (MIG) is chosen by its name alone.
void seeOwnDevices() {
  const char* chosen = std::getenv("CUDA_VISIBLE_DEVICES");
  if (chosen != nullptr && std::strstr(chosen, "MIG-") == nullptr) unsetenv("CUDA_VISIBLE_DEVICES");
}

int serve(const server::WorkerArguments& arguments) {
  const bool ownGpus = arguments.devices && !arguments.devices->gpus.empty();
  server::preferForOutOfMemory();
  server::walls::State walls;
  std::string unprotected;
  try {
    walls = server::walls::raise(
        {arguments.walls, true, arguments.driver, arguments.moduleCache, arguments.devices});
    if (arguments.users) {
      if (!server::walls::hasOwnUser(*arguments.users))
        throw std::runtime_error("--users: this process has none of these user ids");
      walls.standing.emplace_back(server::walls::kOwnUser);
    }
    if (ownGpus) seeOwnDevices();
  } catch (const std::exception& e) {
    unprotected = e.what();
  }
  transport::expeditedBarrier();  // registering takes 17 ms once the driver's threads are there
  server::WorkerProcess process(server::kControlDescriptor, schema::rowsHash());
  std::unique_ptr<const server::Driver> driver;
  server::HostPages pages;
  try {
    if (!unprotected.empty()) throw std::runtime_error(unprotected);
    driver = server::Driver::load(arguments.driver);
    CUcontext context = server::warmUp(*driver, arguments.warmDevice);
    server::walls::closeLocal();
    pages = server::makeHostPages();
    if (context != nullptr) server::registerHostPages(*driver, context, pages);
  } catch (const std::exception& e) {
    process.reportFailed(e.what());
    return 1;
  }
  process.reportReady(driver->path(), walls.standing);
  auto start = process.waitForSession();
  if (!start) return 0;
  std::string why;
  try {
    if (ownGpus) server::findDevices(*driver, *start);
    if (sharesMemory(start->transport)) server::walls::closeNetwork();
    server::Descriptor state(start->state);
    server::StateSocket stateSocket(std::move(state), [&] { return process.stopping(); });
    server::Rebuild rebuild(*driver, stateSocket, start->stream, [&] { return process.stopping(); });
    auto account = std::make_unique<server::RebuildAccount>(std::make_unique<server::ServerAccount>(process));
    server::RebuildAccount& memory = *account;
    std::unique_ptr<transport::Connection> connection;
    if (start->rebuild) {
      why = receive(*driver, *start, stateSocket, rebuild, pages);
    } else {
      connection = connect(arguments, *start, start->transport, start->socket);
    }
    // With --disturb-streams both workers are of one server, whose account has the memory already.
    if (!start->rebuild || (start->stream && !arguments.disturbStreams)) memory.settle();
    const int clientGone = connection != nullptr ? connection->wakeupDescriptor() : -1;
    server::Session session(*driver, *start, std::move(connection), std::move(pages), std::move(account));
    std::atomic<bool> served{!start->rebuild};  // it has a client
    std::atomic<bool> awaited{false};           // nobody but this worker has the session, which has none yet
    server::Suspender suspender(
        session, [&](const server::SuspendOutcome& outcome) { process.reportSuspended(outcome); },
        [&](const server::MoveOutcome& outcome) { process.reportMoved(outcome); });
    process.onOrders(
        {[&](std::chrono::milliseconds drain, int copier) { suspender.suspend(drain, copier); },
         [&] { suspender.resume(); },
         [&](std::chrono::milliseconds drain, uint64_t epoch, int copier, int socket, bool direct) {
           suspender.move(drain, epoch, copier, socket, direct);
         },
         [&](std::chrono::milliseconds drain, uint64_t epoch, int socket) {
           suspender.hold(drain, epoch, socket);
         },
         [&](std::chrono::milliseconds drain, int socket) { suspender.copy(drain, socket); },
         [&](std::chrono::milliseconds drain, int socket) { suspender.copyPages(drain, socket); },
         [&](uint64_t frame, uint64_t aside) { session.tellKept(frame, aside); },
         [&](uint64_t number) { session.sharedEvents().gone(number); },
         [&]() -> std::string {
           if (!served) return awaited ? "" : "its client has not come yet";
           const std::string why = suspender.apart();
           return why.empty() && session.clientLeft() ? "its client has left" : why;
         },
         [&](bool held) { return suspender.decided(held); }});
    session.onClientLog([&](const server::ClientLog& log) { process.reportLog(log); });
    if (arguments.disturb) suspender.compareContents();
    if (arguments.disturbKills)
      server::disturbByDeath(session, suspender, *arguments.disturb, [&] { process.reportDisturb(); });
    else if (arguments.disturbBeginnings)
      server::disturbBeginning(session, *arguments.disturb);
    else if (arguments.disturb)
      server::disturb(session, suspender, *arguments.disturb,
                      arguments.disturbMoves || arguments.disturbStreams,
                      arguments.disturbStreams && transportApart(start->transport) != start->transport,
                      [&] { process.reportDisturb(); });
    std::optional<server::ActivityWatch> activity;
    if (start->reportActivity)
      activity.emplace(session, [&](server::Activity now) { process.reportActivity(now); });
    process.watchServer(
        [&](const std::string& reason) {
          // Its client asks its holder, and must see nothing of this end: no call that fails.
          if (start->holderKeeps && reason.starts_with(server::kServerDiedText)) _exit(0);
          session.stop(reason + "; start the program again");
        },
        server::WorkerProcess::kGrace, clientGone);
    server::onDeviceLost(
        [&](uint32_t ordinal, const std::string& error) { process.reportLost(ordinal, error); });
    if (start->rebuild) {
      if (why.empty()) why = rebuild.make(session);
      awaited = start->files && why.empty();  // when the server hears so, its death ends this session no more
      rebuild.answer(why);
      process.reportRebuilt(why);
      if (!why.empty()) _exit(0);
      const auto client = waitForClient(process, start->stream ? &stateSocket : nullptr, start->files);
      if (!client) _exit(0);  // the session goes on where it was, or has ended
      memory.settle();
      // It may be on this host now.
      const std::string over =
          process.clientTransport().empty() ? start->transport : process.clientTransport();
      if (over != start->transport && sharesMemory(over)) server::walls::closeNetwork();
      auto made = connect(arguments, *start, over, *client);
      process.watchClient(made->wakeupDescriptor());
      session.connect(std::move(made));
      served = true;
    }
    server::HindranceWatch hindrances(
        session, [&](const std::vector<std::string>& reasons) { process.reportHindrances(reasons); });
    server::CountWatch counts(session.counts(),
                              [&](const server::SessionCounts& now) { return process.reportCounts(now); });
    why = session.run();
    suspender.settle(std::chrono::seconds(5));
    auto traffic = session.connection().traffic();
    if (traffic.copiedBytes + traffic.movedBytes != 0)
      GPUPOOL_INFO("puts and gets: %llu bytes copied by a processor, %llu bytes moved by RDMA alone",
                   static_cast<unsigned long long>(traffic.copiedBytes),
                   static_cast<unsigned long long>(traffic.movedBytes));
    counts.tell();
    process.reportEnded(why);
    // What it was told does not end with this process.
    if (!session.clientLeft()) session.connection().close();
    checkLeaks();
    // The driver's own threads may still be inside the session's callbacks or kernels; process exit ends them
    // and frees the device faster than an orderly teardown, and nothing outlives this process.
    _exit(0);
  } catch (const std::exception& e) {
    GPUPOOL_ERROR("session failed: %s", e.what());
    process.reportEnded(e.what());
    return 1;
  }
}

}  // namespace

int main(int count, char** words) {
  log::setProcessName("worker");
  prctl(PR_SET_NAME, "gpupool-worker");  // one that is executed by descriptor is named after its number
  try {
    if (server::isCopier(count, words)) {
      auto arguments = server::parseCopierArguments(count, words);
      arguments.rowsHash = schema::rowsHash();
      return server::runCopier(arguments);
    }
    auto arguments = server::parseWorkerArguments(count, words);
    if (arguments.help) {
      std::fputs(server::kWorkerUsage, stdout);
      return 0;
    }
    if (arguments.identify) {
      const server::WorkerIdentity identity{server::kWorkerInterface, schema::rowsHash(),
                                            schema::kProtocolVersion, schema::release()};
      std::puts(textOf(identity).c_str());
      return 0;
    }
    if (arguments.inventory) return server::runInventory(arguments.driver, schema::rowsHash());
    return serve(arguments);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "gpupool-worker: %s\n", e.what());
    return 1;
  }
}
