#pragma once
// Tells a lease's holder what NVML says of the lease's devices (SessionHello.asks): of those alone, with the
// pool's PCI addresses, and with the lease's own share where it has one. Where there is no NVML, as with
// software GPUs, there is what the server knows itself: names, memory and who uses it. Asking takes no
// worker.
//
// NVML is asked by a thread of its own (health/watch.h); an answer waits for it at most `freshBound`. Who has
// proven the lease's key may ask on `perLease` connections at once, and one that is idle for `idleBound` is
// closed. Belongs to the event loop's thread.

#include <kj/async-io.h>

#include <map>
#include <string>
#include <vector>

#include "server/front/leases.h"
#include "server/front/sessions.h"
#include "server/health/watch.h"

namespace gpupool::server {

class FigureDesk final : private kj::TaskSet::ErrorHandler {
 public:
  struct Settings {
    std::string server;  // ServerInfo.name
    kj::Duration freshBound = 1 * kj::SECONDS;
    kj::Duration look = 5 * kj::MILLISECONDS;  // between two looks at whether NVML has answered
    kj::Duration idleBound = 60 * kj::SECONDS;
    kj::Duration writeBound = 2 * kj::SECONDS;
    size_t perLease = 64;
  };
  FigureDesk(kj::Timer& timer, LeaseTable& leases, SessionTable& sessions, health::Watch& health,
             Settings settings);
  KJ_DISALLOW_COPY(FigureDesk);

  // Whose holder has proven its key.
  void serve(kj::Own<kj::AsyncIoStream> stream, const Id& lease);
  // Of the lease's devices, in its order.
  std::vector<schema::NvmlFigures> figures(const Grant& grant, const health::Figures& taken) const;

 private:
  kj::Promise<void> serveNext(kj::AsyncIoStream& stream, Id lease);
  kj::Promise<void> answer(kj::AsyncIoStream& stream, Id lease);
  // Until NVML has said something that is no older, or the time is over.
  kj::Promise<void> fresh(std::chrono::milliseconds age, kj::TimePoint until);
  void fillOwn(const Device& device, schema::NvmlFigures& to) const;
  static void fillSoftwarePairs(size_t place, schema::NvmlFigures& to);
  void fillMemory(const Grant& grant, size_t place, schema::NvmlFigures& to) const;
  void fillProcesses(const Grant& grant, size_t place, schema::NvmlFigures& to) const;
  uint64_t usedByLeases(size_t device) const;
  void taskFailed(kj::Exception&& exception) override;

  kj::Timer& timer_;
  LeaseTable& leases_;
  SessionTable& sessions_;
  health::Watch& health_;
  Settings settings_;
  std::map<Id, size_t> connections_;
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
