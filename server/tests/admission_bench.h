#pragma once
// A server's admission with one lease, on the second of two devices; its workers are processes.

#include "server/front/admission.h"
#include "server/tests/support.h"

#include "catch.h"

namespace gpupool::server::test {

struct AdmissionBench {
  kj::AsyncIoContext io = kj::setupAsyncIo();
  kj::Timer& timer = io.provider->getTimer();
  Folder folder;
  LeaseTable leases{twoDevices()};
  SessionTable sessions{
      timer, {.stop = 1 * kj::SECONDS, .exit = 1 * kj::SECONDS}, [](uint32_t, const std::string&) {}};
  kj::Own<WorkerPools> pool;
  kj::Own<Admission> admission;

  explicit AdmissionBench(const std::function<void(Admission::Settings&)>& adjust = {}, uint32_t warm = 1) {
    WorkerPool::Settings workers;
    workers.program = FAKE_WORKER;
    workers.arguments = {"--driver", FAKE_DRIVER};
    workers.warm = warm;
    workers.rowsHash = kRows;
    const OtherWorker other{makeOtherWorker(folder.path, FAKE_WORKER),
                            {.rows = kOtherRows, .frames = 4, .release = "0.0.8"}};
    pool = kj::heap<WorkerPools>(io.unixEventPort, timer, workers, "", std::vector{other});
    Admission::Settings settings;
    settings.server = kServer;
    settings.messageBound = 60 * kj::SECONDS;
    settings.workerBound = 5 * kj::SECONDS;
    settings.starts.moduleCache = folder.path;
    if (adjust) adjust(settings);
    admission = kj::heap<Admission>(timer, leases, sessions, *pool, settings);
    grant({1, 1}, 1, {1});
  }
  ~AdmissionBench() {
    sessions.endAll("test over").wait(io.waitScope);
    pool->stop().wait(io.waitScope);
  }
  void grant(Id id, uint64_t epoch, std::vector<int> devices) {
    capnp::MallocMessageBuilder message;
    fillLease(message.initRoot<gpupool::schema::Lease>(), id, epoch, std::move(devices));
    REQUIRE_FALSE(leases.grant(message.getRoot<gpupool::schema::Lease>().asReader()).has_value());
  }
  kj::Own<kj::AsyncIoStream> connect(const std::string& peer = "uid 1") {
    auto [client, server] = connection(*io.lowLevelProvider);
    admission->admit(kj::mv(server), peer);
    return kj::mv(client);
  }
  // What the server says to this opening; "" is yes. A closed connection is "disconnected".
  std::string open(Opening& opening, const std::string& peer = "uid 1") {
    try {
      opening.run(connect(peer)).wait(io.waitScope);
    } catch (const kj::Exception& exception) {
      return exception.getType() == kj::Exception::Type::DISCONNECTED ||
                     contains(exception.getDescription().cStr(), "Premature EOF")
                 ? "disconnected"
                 : exception.getDescription().cStr();
    }
    return opening.error;
  }
  // Sends raw bytes and waits for the server to hang up; true if it did so without an answer.
  bool hangsUp(const std::string& bytes) {
    auto stream = connect("uid raw");
    stream->write(bytes.data(), bytes.size()).catch_([](kj::Exception&&) {}).wait(io.waitScope);
    char answer[64];
    const size_t got = stream->tryRead(answer, 1, sizeof answer)
                           .catch_([](kj::Exception&&) { return size_t{0}; })
                           .wait(io.waitScope);
    eventually(timer, [&] { return admission->underWay() == 0; }).wait(io.waitScope);
    return got == 0;
  }
};

}  // namespace gpupool::server::test
