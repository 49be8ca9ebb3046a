#pragma once
// Events that several sessions of a tenant record and wait for. Such an event is a cell of host memory that
// their workers map: a counter of its records, and for each of the last of them a mark, which the stream of
// the record sets (cuStreamWriteValue64) and other streams wait for. So it needs nothing of the driver but
// what completion words need, and works between any devices.
//
// Another session's cells stay mapped while events of it are open here; of other sessions', those of a few.
//
// Threads: records, waits, queries, forget and contextEnded by the executor; offers and openings by those
// beside it; gone by the one that watches the server. No lock that the executor takes is held while the
// driver is called, but for registering memory.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "server/driver.h"
#include "server/worker/account.h"
#include "transports/transport.h"

namespace gpupool::server {

class SharedEvents {
 public:
  SharedEvents(const Driver& driver, Account& account) : driver_(driver), account_(account) {}
  ~SharedEvents();
  SharedEvents(const SharedEvents&) = delete;
  SharedEvents& operator=(const SharedEvents&) = delete;

  // `event` is the session's name of it. Needs the event's context. What it has been recorded for so far
  // counts as the first record. However many threads offer it, it has one token.
  CUresult offer(uint64_t event, CUevent real, schema::ShareToken& token);
  CUresult open(uint64_t event, const schema::ShareToken& token);
  // Each CUDA_ERROR_INVALID_HANDLE of an event that is not shared. The stream's context is current.
  CUresult record(uint64_t event, CUstream stream);
  CUresult wait(uint64_t event, CUstream stream);
  CUresult query(uint64_t event) const;
  // It is destroyed. `idle` says that no stream of the session has work, nor a capture. Only then is memory
  // of other sessions given back: streams may have yet to look at it, and the driver waits meanwhile for all
  // work of the context, which may wait for what the program says next.
  void forget(uint64_t event, const std::function<bool()>& idle);
  void contextEnded(CUcontext context);
  // That session has ended: what it has recorded is reached.
  void gone(uint64_t session);
  // How many there are.
  size_t shared() const;

 private:
  static constexpr size_t kMarks = 31, kCellBytes = 512, kCells = 512;
  // Of this session; cells that wait for their next event.
  static constexpr size_t kMostSlabs = 64, kRest = 128;
  // Of others' slabs that stay mapped though no event of them is open here.
  static constexpr size_t kMostLeft = 16;
  struct Cell;
  struct Slab;
  struct Event {
    std::shared_ptr<Slab> slab;
    size_t cell = 0;
    schema::ShareToken token;  // offered here
    uint64_t opening = 0;      // or another session's
  };
  bool find(uint64_t event, Event& found) const;
  CUresult takeCell(Event& event);
  CUresult makeSlab();
  CUresult mark(const Event& event, CUstream stream, Cell& cell);
  CUresult addressOf(const Event& event, uint64_t record, CUdeviceptr& address);
  std::shared_ptr<Slab> openSlab(int descriptor, size_t bytes);
  void unregister(Slab& slab);
  void dropLeft(const std::function<bool()>& idle);

  const Driver& driver_;
  Account& account_;
  std::mutex offering_;  // one offer at a time; taken before the others
  mutable std::mutex mutex_;
  std::map<uint64_t, Event> events_;
  std::vector<std::shared_ptr<Slab>> own_;
  std::map<uint64_t, std::shared_ptr<Slab>> opened_;           // by inode
  uint64_t forgotten_ = 0;                                     // events
  std::deque<std::pair<std::shared_ptr<Slab>, size_t>> free_;  // the longest unused first
  std::mutex views_;
};

}  // namespace gpupool::server
