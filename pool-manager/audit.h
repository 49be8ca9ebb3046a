#pragma once
// What has happened to leases and servers, on whose word and why: the latest entries, in memory and in the
// store (AuditEntry of pool.capnp under "audit/<number>"). An entry is written in the transaction of what it
// tells of, and counts when the store has accepted that. One thread.

#include <deque>
#include <string>
#include <vector>

#include "pool-manager/store/store.h"
#include "schema/id.h"

namespace gpupool::pool {

inline const std::string kAuditPrefix = "audit/";

// As in pool.capnp.
enum class AuditEvent : uint32_t {
  queued,
  unserved,
  granted,
  suspended,
  resumed,
  moving,
  moved,
  released,
  expired,
  revoked,
  lost,
  cordoned,
  uncordoned,
  tokenCreated,
  tokenRevoked,
  quotaSet,
  adopted,
  left,
  held,
  restored,
  preempting,
  serverAlive,
  serverLost,
  serverLeft,
  stayed
};
const char* name(AuditEvent event);

struct AuditEntry {
  uint64_t number = 0, timeMs = 0;  // since 1970
  AuditEvent event = AuditEvent::queued;
  Id lease;  // all zero: it is about a server or, if that is empty, a tenant
  std::string server, tenant, holder, by, reason;
};

struct AuditQuery {
  uint64_t after = 0;    // a number
  uint64_t sinceMs = 0;  // ago; 0: ever
  std::string lease;     // its id begins with this; empty: all
};

class AuditLog {
 public:
  // most: entries that are kept; 0: none is written.
  explicit AuditLog(size_t most) : most_(most) {}
  // Throws std::runtime_error if the store has something else there.
  void load(const std::vector<Entry>& stored);

  // What is on its way to the store.
  struct Pending {
    AuditEntry entry;
    uint64_t erased = 0;  // these, and all before, are erased with it
  };
  // Gives the entry its number, and adds to the transaction what writes it and erases those beyond the bound.
  Pending write(AuditEntry entry, std::vector<Write>& writes);
  // The store has accepted that.
  void accepted(Pending pending);

  const std::deque<AuditEntry>& entries() const { return entries_; }  // by number
  // The first entry after that number.
  std::deque<AuditEntry>::const_iterator after(uint64_t number) const;
  uint64_t latest() const { return entries_.empty() ? 0 : entries_.back().number; }

 private:
  size_t most_;
  uint64_t last_ = 0;  // number
  std::deque<AuditEntry> entries_;
};

}  // namespace gpupool::pool
