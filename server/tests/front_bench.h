#pragma once
// A whole server in this process's event loop, and a manager that does what the test says.

#include "server/front/front.h"

#include <capnp/rpc-twoparty.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstring>
#include <thread>

#include "base/process_name.h"
#include "schema/convert.h"
#include "schema/device_sample.h"
#include "schema/protocol.h"
#include "server/front/device_lock.h"
#include "server/tests/support.h"

#include "catch.h"

namespace gpupool::server::test {

inline std::vector<uint64_t> amounts(capnp::List<uint64_t>::Reader list) {
  std::vector<uint64_t> amounts;
  for (const uint64_t amount : list) amounts.push_back(amount);
  return amounts;
}

// What the manager saw, and how it answers.
struct Seen {
  int joins = 0, beats = 0, leaves = 0;
  Id incarnation;
  std::string name, local, host;
  uint16_t port = 0;
  size_t devices = 0;
  std::vector<std::string> leftOut, walls, missingWalls;
  std::vector<uint64_t> epochs;
  std::vector<std::vector<Id>> running;
  uint64_t rows = 0;
  std::vector<uint64_t> workers;  // by their rows
  int workersTold = 0;
  std::vector<Id> activeLeases;
  std::vector<std::pair<Id, std::vector<uint64_t>>> suspended;
  uint32_t overcommitPercent = 0;
  std::map<Id, schema::TurnPlace> turns;
  std::map<Id, std::vector<std::string>> hindrances;
  std::map<Id, std::string> lentTo;            // of those of which something is said
  std::map<Id, std::vector<uint64_t>> counts;  // calls, awaited ones, bytes to devices and from them
  std::map<Id, int64_t> checkpointAges;
  std::vector<std::string> problems;
  std::vector<DeviceSample> samples;
  std::vector<uint64_t> nvlinks;
  int fabricsTold = 0;
  uint32_t warm = 0;
  bool known = true;
  bool mute = false;  // beats are never answered
  kj::Maybe<schema::ServerControl::Client> control;
};

class FakeManager final : public schema::Manager::Server {
 public:
  explicit FakeManager(Seen& seen) : seen_(seen) {}

 protected:
  kj::Promise<void> login(LoginContext context) override {  // no token is needed
    context.getResults().setProtocol(schema::poolProtocol());
    return kj::READY_NOW;
  }
  kj::Promise<void> join(JoinContext context) override {
    const auto info = context.getParams().getInfo();
    ++seen_.joins;
    seen_.incarnation = schema::read(info.getIncarnation());
    seen_.name = info.getName().cStr();
    seen_.local = info.getLocalPath().cStr();
    seen_.host = info.getHost().cStr();
    seen_.port = info.getPort();
    seen_.devices = info.getDevices().size();
    seen_.overcommitPercent = info.getOvercommitPercent();
    seen_.leftOut.clear();
    for (auto note : info.getLeftOut()) seen_.leftOut.push_back(note.cStr());
    seen_.walls.clear();
    for (auto wall : info.getWalls()) seen_.walls.push_back(wall.cStr());
    seen_.missingWalls.clear();
    for (auto wall : info.getMissingWalls()) seen_.missingWalls.push_back(wall.cStr());
    seen_.epochs.clear();
    seen_.running.clear();
    for (auto report : context.getParams().getReports()) {
      seen_.epochs.push_back(report.getHighestEpoch());
      auto& ids = seen_.running.emplace_back();
      for (auto id : report.getRunning()) ids.push_back(schema::read(id));
    }
    seen_.rows = info.getRowsHash();
    noteWorkers(info.getWorkers());
    noteFabric(info.getFabric());
    seen_.control = context.getParams().getControl();
    seen_.known = true;
    context.getResults().setBeatMs(30);
    return kj::READY_NOW;
  }
  kj::Promise<void> beat(BeatContext context) override {
    const auto params = context.getParams();
    ++seen_.beats;
    if (seen_.mute) return kj::NEVER_DONE;
    if (params.getWorkers().size() != 0) noteWorkers(params.getWorkers());
    if (params.hasFabric()) noteFabric(params.getFabric());
    seen_.activeLeases.clear();
    for (auto id : params.getActiveLeases()) seen_.activeLeases.push_back(schema::read(id));
    seen_.suspended.clear();
    for (auto lease : params.getSuspended())
      seen_.suspended.emplace_back(schema::read(lease.getId()), amounts(lease.getKept()));
    seen_.turns.clear();
    for (auto turn : params.getTurns()) seen_.turns[schema::read(turn.getId())] = turn.getPlace();
    seen_.hindrances.clear();
    seen_.lentTo.clear();
    for (auto lease : params.getHindrances()) {
      const Id id = schema::read(lease.getId());
      for (auto reason : lease.getReasons()) seen_.hindrances[id].push_back(reason.cStr());
      if (lease.getLentTo().size() != 0) seen_.lentTo[id] = lease.getLentTo().cStr();
    }
    seen_.counts.clear();
    seen_.checkpointAges.clear();
    for (auto one : params.getCounts()) {
      const Id lease = schema::read(one.getId());
      seen_.counts[lease] = {one.getCalls(), one.getAwaited(), one.getToDeviceBytes(),
                             one.getFromDeviceBytes()};
      seen_.checkpointAges[lease] = one.getCheckpointAgeMs();
    }
    seen_.problems.clear();
    for (auto problem : params.getProblems()) seen_.problems.push_back(problem.cStr());
    seen_.samples.clear();
    for (auto sample : params.getSamples()) seen_.samples.push_back(schema::read(sample));
    seen_.warm = params.getWarmWorkers();
    context.getResults().setKnown(seen_.known);
    return kj::READY_NOW;
  }
  kj::Promise<void> leave(LeaveContext) override {
    ++seen_.leaves;
    return kj::READY_NOW;
  }

 private:
  void noteWorkers(capnp::List<schema::WorkerVersion>::Reader workers) {
    ++seen_.workersTold;
    seen_.workers.clear();
    for (auto worker : workers) seen_.workers.push_back(worker.getRowsHash());
  }
  void noteFabric(schema::Fabric::Reader fabric) {
    ++seen_.fabricsTold;
    seen_.nvlinks = amounts(fabric.getNvlinks());
  }
  Seen& seen_;
};

// The manager's socket; destroying it closes every connection.
struct Manager : kj::TaskSet::ErrorHandler {
  Manager(kj::AsyncIoContext& io, const std::string& path, Seen& seen)
      : path(path), listener(*io.lowLevelProvider, path), server(kj::heap<FakeManager>(seen)), tasks(*this) {
    tasks.add(server.listen(listener.receiver()));
  }
  void taskFailed(kj::Exception&&) override {}
  std::string path;
  LocalListener listener;
  capnp::TwoPartyServer server;
  kj::TaskSet tasks;
};

struct Bench {
  kj::AsyncIoContext io = kj::setupAsyncIo();
  kj::Timer& timer = io.provider->getTimer();
  Folder folder;
  Seen seen;
  kj::Own<Manager> manager;
  kj::Own<Front> front;

  explicit Bench(bool withManager = true, bool network = false,
                 const std::function<void(ServerOptions&)>& adjust = {}) {
    if (withManager) startManager();
    ServerOptions options;
    options.manager = "unix:" + managerPath();
    options.name = kServer;
    options.state = folder.path;
    options.local = localPath();
    if (network) options.listen = "127.0.0.1:0";
    options.driver = FAKE_DRIVER;
    options.worker = FAKE_WORKER;
    options.warm = 1;
    options.warmContexts = false;
    options.stopTime = std::chrono::milliseconds(300);
    options.deviceLocks = folder.path;
    options.walls = "off";  // the worker is none
    if (adjust) adjust(options);
    options.complete();
    front = kj::heap<Front>(io, options);
    front->start().wait(io.waitScope);
  }
  ~Bench() {
    if (front.get() != nullptr) front->stop().wait(io.waitScope);
  }
  std::string managerPath() const { return folder.path + "/manager.sock"; }
  std::string localPath() const { return folder.path + "/server.sock"; }
  void startManager() { manager = kj::heap<Manager>(io, managerPath(), seen); }
  void until(std::function<bool()> condition) { eventually(timer, std::move(condition)).wait(io.waitScope); }

  schema::ServerControl::Client control() {
    KJ_IF_MAYBE (client, seen.control) {
      return *client;
    }
    KJ_FAIL_REQUIRE("no server joined");
  }
  void grant(Id id, uint64_t epoch, uint64_t memory = kGiB) {
    auto request = control().grantRequest();
    fillLease(request.initLease(), id, epoch, {0}, memory);
    request.send().ignoreResult().wait(io.waitScope);
  }
  void revoke(Id id, const std::string& reason) {
    auto request = control().revokeRequest();
    schema::write(id, request.initId());
    request.setReason(reason);
    request.send().ignoreResult().wait(io.waitScope);
  }
  std::vector<uint64_t> suspend(Id id) {
    auto request = control().suspendRequest();
    schema::write(id, request.initId());
    request.setDrainMs(1000);
    auto response = request.send().wait(io.waitScope);
    CHECK(response.getResult().getMoveMs() == (response.getResult().getMovedBytes() == 0 ? 0 : 7));
    return amounts(response.getResult().getKept());
  }
  void resume(Id id) {
    auto request = control().resumeRequest();
    schema::write(id, request.initId());
    request.send().ignoreResult().wait(io.waitScope);
  }
  kj::Own<kj::AsyncIoStream> connect(const std::string& address) {
    auto parsed = io.provider->getNetwork().parseAddress(address).wait(io.waitScope);
    return parsed->connect().wait(io.waitScope);
  }
  std::string open(Opening& opening) {
    opening.run(connect("unix:" + localPath())).wait(io.waitScope);
    return opening.error;
  }
};

}  // namespace gpupool::server::test
