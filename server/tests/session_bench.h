#pragma once
// A server's parts that begin, suspend and move sessions, with real processes: workers and a copier that do
// what a test says. The test is the sessions' clients, too.

#include <map>

#include "server/front/admission.h"
#include "server/front/checkpoints.h"
#include "server/front/copier_child.h"
#include "server/front/listeners.h"
#include "server/front/migration.h"
#include "server/tests/support.h"

#include "catch.h"

namespace gpupool::server::test {

inline constexpr Id kLease{1, 1};

struct EventLoop {
  kj::AsyncIoContext io = kj::setupAsyncIo();
};

// What a test has otherwise.
struct SideSettings {
  std::string server = kServer;
  std::function<void(Admission::Settings&)> admission = [](Admission::Settings&) {};
  std::function<void(CopierChild::Settings&)> copier = [](CopierChild::Settings&) {};
  std::function<void(Suspension::Settings&)> suspension = [](Suspension::Settings&) {};
  std::function<void(Migration::Settings&)> migration = [](Migration::Settings&) {};
  std::string checkpointFolder = {};
  bool network = true;       // Checkpoints::Settings
  bool otherWorker = false;  // it has a program for kOtherRows, too
  SessionTable::Bounds bounds{.stop = 1 * kj::SECONDS, .exit = 1 * kj::SECONDS};
};

class ServerSide : private kj::TaskSet::ErrorHandler {
 public:
  kj::AsyncIoContext& io;
  const SideSettings settings;
  Folder programs;  // of other workers
  kj::Timer& timer;
  LeaseTable leases{twoDevices()};
  SessionTable sessions;
  WorkerPools pool;
  Admission admission;
  CopierChild copier;
  Suspension suspension;
  Migration migration;
  Checkpoints checkpoints;
  bool dies = false;  // as a server that is killed: nobody is told, and the workers go with it

  ServerSide(kj::AsyncIoContext& io, SideSettings given)
      : io(io),
        settings(std::move(given)),
        timer(io.provider->getTimer()),
        sessions(timer, settings.bounds,
                 [this](uint32_t ordinal, const std::string& error) { leases.setBroken(ordinal, error); }),
        pool(io.unixEventPort, timer, workers(), "", otherWorkers()),
        admission(timer, leases, sessions, pool, admissionSettings()),
        copier(io.unixEventPort, timer, copierSettings()),
        suspension(timer, leases, sessions, suspensionSettings()),
        migration(io.provider->getNetwork(), timer, leases, sessions, suspension, pool, admission.starts(),
                  migrationSettings()),
        checkpoints(
            timer, leases, sessions, suspension, pool, admission.starts(),
            {.server = settings.server, .folder = settings.checkpointFolder, .network = settings.network}),
        accepting_(*this) {}
  ~ServerSide() {
    if (!dies) stop();
  }
  void stop() {
    sessions.endAll("test over").wait(io.waitScope);
    pool.stop().wait(io.waitScope);
    copier.stop().wait(io.waitScope);
    dies = true;
  }

  // ---- leases ----
  std::string grant(Id id, uint64_t epoch, uint64_t memory, std::vector<int> devices = {0, 1}) {
    return test::grant(leases, id, epoch, std::move(devices), memory);
  }
  std::string addTarget(uint64_t epoch, std::vector<int> devices, uint64_t memory = kGiB) {
    return test::addTarget(leases, kLease, epoch, std::move(devices), memory);
  }
  bool paused() { return leases.admissible(kLease)->paused; }
  uint64_t epoch(uint64_t number) { return leases.admissible(kLease)->sessionEpochs.at({2, number}); }
  // The lease ends, as the manager orders it.
  void revoke(const std::string& why = "revoked") {
    leases.close(kLease);
    sessions.end(kLease, why).wait(io.waitScope);
    leases.remove(kLease);
  }

  // ---- sessions ----
  kj::Promise<void> opening(Opening& opening, Id session) {
    opening.session = session;
    opening.server = settings.server;
    auto [client, server] = connection(*io.lowLevelProvider);
    admission.admit(kj::mv(server), "uid 1");
    return opening.run(kj::mv(client));
  }
  // A new session or, with an epoch, the client of one that moves. What the server says of it.
  std::string open(Opening& opening, uint64_t number, uint64_t epoch = 1) {
    opening.epoch = epoch;
    this->opening(opening, {2, number}).wait(io.waitScope);
    return opening.error;
  }
  Opening session(uint64_t number, const std::string& command = "test", const std::string& transport = "shm",
                  uint64_t rows = kRows) {
    Opening one;
    one.rowsHash = rows;
    one.command = command;
    one.transport = transport;
    const size_t before = sessions.living(kLease);
    REQUIRE(open(one, number) == "");
    until([&] { return sessions.living(kLease) > before; });
    return one;
  }
  std::string order(Opening& session, char letter) { return session.order(letter).wait(io.waitScope); }
  std::string hear(Opening& session) { return session.hear().wait(io.waitScope); }
  pid_t worker(Opening& session) { return std::stoi(order(session, 'p')); }
  // How session or next worker take the next order to move.
  void misbehave(Opening& session, char how) {
    const char text[] = {'V', how};
    session.stream->write(text, sizeof text).wait(io.waitScope);
    REQUIRE(hear(session) == "will do");
  }
  void say(Opening& session, char letter) { session.stream->write(&letter, 1).wait(io.waitScope); }
  // Workers besides those that wait for a session.
  size_t known() { return sessions.workers().size(); }
  // How sessions ended, the latest first.
  std::vector<std::string> endTexts() {
    capnp::MallocMessageBuilder message;
    auto results = message.initRoot<schema::ServerControl::SessionsResults>();
    sessions.write([&](unsigned count) { return results.initSessions(count); });
    std::vector<std::string> texts;
    for (auto session : results.getSessions())
      if (session.getEnded()) texts.emplace_back(session.getText().cStr());
    return texts;
  }
  // Why the latest session ended; "" if none has.
  std::string endText() {
    const auto texts = endTexts();
    return texts.empty() ? "" : texts.front();
  }

  // ---- moves ----
  kj::Promise<Migrated> migrate(uint32_t drainMs = 1000, std::optional<MoveTarget> target = std::nullopt) {
    return migration.migrate(kLease, drainMs, std::move(target)).eagerlyEvaluate(nullptr);
  }
  std::string fails(kj::Promise<Migrated>& order) {
    return failure([&] { order.wait(io.waitScope); });
  }
  // Takes sessions from the network; where it is.
  Destination listen() {
    network_ = io.provider->getNetwork().parseAddress("127.0.0.1:0").wait(io.waitScope)->listen();
    accepting_.add(accept());
    return {settings.server, "127.0.0.1", static_cast<uint16_t>(network_->getPort())};
  }

  // ---- time ----
  void until(std::function<bool()> condition) { eventually(timer, std::move(condition)).wait(io.waitScope); }
  void pause(int milliseconds) { timer.afterDelay(milliseconds * kj::MILLISECONDS).wait(io.waitScope); }

 private:
  static WorkerPool::Settings workers() {
    WorkerPool::Settings workers;
    workers.program = FAKE_WORKER;
    workers.arguments = {"--driver", FAKE_DRIVER};
    workers.warm = 1;
    workers.rowsHash = kRows;
    return workers;
  }
  std::vector<OtherWorker> otherWorkers() {
    if (!settings.otherWorker) return {};
    return {
        {makeOtherWorker(programs.path, FAKE_WORKER), {.rows = kOtherRows, .frames = 4, .release = "0.0.8"}}};
  }
  Admission::Settings admissionSettings() {
    Admission::Settings admission;
    admission.server = settings.server;
    admission.failureBurst = 100;
    settings.admission(admission);
    return admission;
  }
  CopierChild::Settings copierSettings() {
    CopierChild::Settings copier;
    copier.program = FAKE_WORKER;
    copier.driver = FAKE_DRIVER;
    copier.budgetBytes = 5 * kGiB;
    settings.copier(copier);
    return copier;
  }
  Suspension::Settings suspensionSettings() {
    Suspension::Settings suspension;
    suspension.copier = [this] { return copier.connect(); };
    settings.suspension(suspension);
    return suspension;
  }
  Migration::Settings migrationSettings() {
    Migration::Settings migration;
    migration.server = settings.server;
    migration.copier = [this] { return copier.connect(); };
    settings.migration(migration);
    return migration;
  }
  kj::Promise<void> accept() {
    return network_->accept().then([this](kj::Own<kj::AsyncIoStream> stream) {
      admission.admit(kj::mv(stream), "network");
      return accept();
    });
  }
  void taskFailed(kj::Exception&&) override {}

  kj::Own<kj::ConnectionReceiver> network_;
  kj::TaskSet accepting_;
};

// One server, with its own event loop.
struct SessionBench : EventLoop, ServerSide {
  explicit SessionBench(SideSettings settings = {}) : ServerSide(EventLoop::io, std::move(settings)) {}
  using ServerSide::io;
};

}  // namespace gpupool::server::test
