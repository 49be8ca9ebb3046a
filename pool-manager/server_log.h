#pragma once
// What the audit log is to tell of servers: that one is there, is lost, or has left. Each change once; but of
// a server that comes and goes all the time, and of all servers together, as when their network fails, no
// more than there is credit for, so that the log, which is bounded, keeps what else has happened. What was
// put off is told when there is credit again, as it is then. No clock and no store; one thread.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "pool-manager/audit.h"

namespace gpupool::pool {

class ServerLog {
 public:
  static constexpr unsigned kMostCredit = 10;          // changes in a row
  static constexpr uint64_t kCreditEveryMs = 360'000;  // one more
  static constexpr unsigned kMostOfAll = 500;          // changes of all servers in a row
  static constexpr uint64_t kOfAllEveryMs = 60'000;    // one more

  // What the log tells so far: a manager that was started again repeats none of it.
  void load(const std::deque<AuditEntry>& entries);
  // event: serverAlive, serverLost or serverLeft. None: that has been told, or is put off.
  std::optional<AuditEntry> note(const std::string& server, AuditEvent event, const std::string& why,
                                 uint64_t now);
  // Of those that were put off.
  std::vector<AuditEntry> due(uint64_t now);
  // The store has not accepted what note() or due() gave.
  void refused(const std::string& server, uint64_t now);
  // Those of which the log says, or is to say, that they are there.
  std::vector<std::string> alive() const;
  // Keeps nothing of servers that have been away for so long.
  void forget(uint64_t now, uint64_t awayMs);

 private:
  struct Server {
    std::optional<AuditEvent> told;
    AuditEvent is = AuditEvent::serverLeft;
    std::string why;
    unsigned credit = kMostCredit, untold = 0;  // changes that were put off
    uint64_t creditMs = 0, changedMs = 0, notBeforeMs = 0;
  };
  std::optional<AuditEntry> tell(const std::string& name, Server& server, uint64_t now);

  unsigned creditOfAll_ = kMostOfAll;
  uint64_t creditOfAllMs_ = 0;
  std::map<std::string, Server> servers_;
  std::set<std::string> putOff_;
};

}  // namespace gpupool::pool
