#pragma once
// When events were recorded, of a session that was moved here: the driver knows nothing of what another
// worker recorded. Before a move the old worker measures how long ago each event was recorded; here the time
// since the move is counted from an event of this class in each context (its origin). So times between two
// events stay what they were, and times across the move have the pause in them, as a clock would.
//
// Threads: any.

#include <atomic>
#include <map>
#include <mutex>
#include <vector>

#include "server/driver.h"
#include "server/worker/record.h"

namespace gpupool::server {

class Session;

class EventTimes {
 public:
  struct Time {
    uint64_t event = 0, context = 0;
    double agoMs = 0;  // from its record to the moment of asking
  };

  // Of all events that were recorded and keep times. Every stream is idle.
  std::vector<Time> measure(Session& session) const;
  // In a session that was rebuilt: these are the times, and `gapMs` have passed since they were measured.
  CUresult adopt(Session& session, const std::vector<Time>& times, double gapMs);

  // The context has ended, and its events with it.
  void contextEnded(uint64_t context);
  // The event ends.
  void forget(uint64_t event) {
    if (any_.load(std::memory_order_relaxed)) forgetKnown(event);
  }
  // cuEventElapsedTime of two events of which the driver does not know one or both.
  void elapsed(const Driver& driver, uint64_t startId, CUevent start, uint64_t endId, CUevent end,
               uint64_t context, float& milliseconds, CUresult& status) const;

 private:
  struct Known {
    uint64_t context = 0;
    double beforeMs = 0;  // from its record to the origin
  };
  void forgetKnown(uint64_t event);
  // Milliseconds from the origin of its context to the event's record. Under mutex_.
  CUresult since(const Driver& driver, CUevent origin, uint64_t context, uint64_t id, CUevent event,
                 double& milliseconds) const;

  std::atomic<bool> any_{false};
  mutable std::mutex mutex_;
  std::map<uint64_t, Known> known_;
  std::map<uint64_t, CUevent> origins_;  // by context
};

}  // namespace gpupool::server
