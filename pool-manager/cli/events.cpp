// gpupool events: what happens to leases and servers, a line each, as it happens. Leases, claims, cordons and
// tokens come from the audit log, entry after entry, so that nothing is missed, also while the manager is
// started again. That a server is there or lost stands in no log: the list of servers is compared with what
// it was.

#include <algorithm>
#include <chrono>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "pool-manager/cli/command.h"
#include "pool-manager/cli/interrupts.h"
#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/output.h"
#include "pool-manager/cli/places.h"
#include "pool-manager/listing_json.h"

namespace gpupool::cli {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr std::chrono::milliseconds kLook{500};
// A manager that was started again knows a server when that has joined anew.
constexpr std::chrono::seconds kServersReturn{20};

const Help kEventsHelp = {
    "gpupool events [options]",
    "Prints what happens to leases and servers from now on, a line each, until Ctrl-C: when, what, to which "
    "lease, where, on whose word, and why. The events are those of `gpupool audit`, and server-alive, "
    "server-lost and server-left: the manager hears of a server, does so no more, or does not know it any "
    "more. While the manager is away it is tried again; what has happened meanwhile is told then. Of other "
    "tenants' leases it is not shown whose they are, nor why something happened. A manager that keeps no "
    "audit log (--audit-entries 0) tells of servers alone. Times are of the manager's clock, but of servers "
    "of this machine's.",
    "GPUPOOL_STATE: the folder of this machine's pool.",
    "0: ended by Ctrl-C, or nobody reads any more, or all is told (--no-follow). 1: no manager was reachable "
    "at first, or it refuses the token. 2: the command line is wrong.",
    "  gpupool events\n  gpupool events --lease 3f2a91c4 --since 1h\n"
    "  gpupool events --server node7 -o json   # a JSON object a line\n"};

struct EventsOptions {
  std::string lease, server;
  bool follow = true;
  std::chrono::milliseconds since{0};
  Output output;

  std::vector<options::Option> table() {
    std::vector<options::Option> own = {
        {"lease", lease, "LEASE", "Only what is about this lease: its id, or how that begins.", true},
        {"server", server, "NAME", "Only what is about this server, or happens to leases there.", true},
        {"since", since, "TIME", "Begin with what has happened so long ago and later. 0: with what follows.",
         true},
        {"follow", follow, "", "Go on until Ctrl-C. Without it, end with what --since asks for.", true}};
    output.addTo(own);
    return own;
  }
  void check() {
    cli::check(output);
    if (lease.find_first_not_of("0123456789abcdef") != std::string::npos)
      throw options::OptionError("--lease: '" + lease + "' is no lease's id");
    if (!follow && since.count() == 0)
      throw options::OptionError("--no-follow: --since says from when on things are told");
  }
};

// One event as it is printed. An entry of the audit log has a number.
struct Happening {
  std::string event;
  pool::AuditEntry entry;
};

Happening ofServer(const char* event, const std::string& server, const std::string& reason) {
  Happening one{event, {}};
  const auto since1970 = std::chrono::system_clock::now().time_since_epoch();
  one.entry.timeMs =
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(since1970).count());
  one.entry.server = server;
  one.entry.by = "the manager";
  one.entry.reason = reason;
  return one;
}

// Which servers there are, and what becomes of them.
class ServerWatch {
 public:
  // What is other than it was; the first time nothing. afterBreak: the manager may have been started again.
  std::vector<Happening> compare(const std::vector<ListedServer>& servers, bool afterBreak) {
    if (afterBreak) patientUntil_ = Clock::now() + kServersReturn;
    std::vector<Happening> news;
    std::map<std::string, bool> now;
    for (const ListedServer& one : servers)
      if (!one.absent) now[one.info.name] = one.alive;
    for (const auto& [name, alive] : now) {
      const auto was = known_.find(name);
      if (was != known_.end() && was->second == alive) continue;
      if (begun_) news.push_back(ofServer(alive ? "server-alive" : "server-lost", name, ""));
      known_[name] = alive;
    }
    if (Clock::now() >= patientUntil_) {
      std::erase_if(known_, [&](const auto& one) {
        if (now.contains(one.first)) return false;
        news.push_back(ofServer("server-left", one.first, ""));
        return true;
      });
    }
    begun_ = true;
    return news;
  }

 private:
  bool begun_ = false;
  std::map<std::string, bool> known_;  // alive, by name
  Clock::time_point patientUntil_;
};

class Printer {
 public:
  explicit Printer(const EventsOptions& options) : options_(options) {
    if (!options.output.json) line({"TIME", "EVENT", "LEASE", "WHERE", "TENANT", "HOLDER", "BY", "WHY"});
  }
  // False: nobody reads any more.
  bool print(const std::vector<Happening>& news) {
    for (const Happening& one : news)
      if (wanted(one)) print(one);
    return static_cast<bool>(std::cout.flush());
  }

 private:
  bool wanted(const Happening& one) const {
    const auto& entry = one.entry;
    // "node7", or of a lease "node7 GPUs 0,1".
    const bool there = entry.server == options_.server || entry.server.starts_with(options_.server + " ");
    return (options_.server.empty() || there) &&
           (options_.lease.empty() ||
            (entry.lease != Id{} && entry.lease.text().starts_with(options_.lease)));
  }
  void print(const Happening& one) {
    const auto& entry = one.entry;
    if (options_.output.json) {
      json object = pool::toJson(entry);
      object["event"] = one.event;
      if (entry.number == 0) object.erase("number");
      std::cout << pool::dump(object, -1) << '\n';
      return;
    }
    line({timeText(entry.timeMs), one.event, entry.lease == Id{} ? "" : shortId(entry.lease), entry.server,
          entry.tenant, entry.holder, entry.by, entry.reason});
  }
  // The lines that follow are not known: each column has a width that most of its words fit into.
  void line(const std::vector<std::string>& cells) const {
    static constexpr size_t kWidths[] = {19, 13, 8, 16, 8, 28, 14, 0};
    std::string text;
    for (size_t i = 0; i < cells.size(); ++i) {
      if (!options_.output.wide() && (i == 4 || i == 5)) continue;
      std::string cell = cells[i].empty() ? "-" : pool::printable(cells[i], 1024);
      if (cell.size() < kWidths[i]) cell.resize(kWidths[i], ' ');
      text += (text.empty() ? "" : "  ") + cell;
    }
    std::cout << text << '\n';
  }

  const EventsOptions& options_;
};

// The audit log from some entry on, and the servers.
class Pursuit {
 public:
  Pursuit(const ClientOptions& client, const EventsOptions& options) : client_(client), options_(options) {
    connect();
    if (options.since.count() == 0)
      passOver();
    else
      audit_ = query_->auditAfter(0, options.lease, static_cast<uint64_t>(options.since.count()));
  }

  // What is new. Nothing, while the manager is away.
  std::vector<Happening> look() {
    try {
      const bool again = query_ == nullptr;
      if (again) connect();
      std::vector<Happening> news = fromAudit();
      // Nobody who asks for a lease asks for servers; and what was before is in no list.
      if (options_.lease.empty() && options_.follow)
        for (Happening& one : servers_.compare(query_->servers(), again)) news.push_back(std::move(one));
      if (std::exchange(away_, false)) say("the manager answers again");
      return news;
    } catch (const LoginRefused&) {
      throw;
    } catch (const CommandError& error) {
      lose(error.what());
    } catch (const kj::Exception& error) {
      lose(pool::errorText(error));
    }
    return {};
  }

 private:
  void connect() { query_ = std::make_unique<ManagerQuery>(client_, 3000); }
  void say(const std::string& text) { std::cerr << "gpupool: " << text << "\n" << std::flush; }
  void lose(const std::string& why) {
    if (!std::exchange(away_, true)) say("the manager does not answer, and is asked again: " + why);
    query_ = nullptr;
  }

  // A manager of before does not say its latest entry without the others.
  void passOver() {
    audit_ = query_->auditAfter(UINT64_MAX, "", 0);
    if (audit_.latest == 0) audit_ = query_->auditAfter(0, "", 0);
    audit_.entries.clear();
  }

  std::vector<Happening> fromAudit() {
    AuditNews news = std::exchange(audit_, {});
    if (begun_) {
      news = query_->auditAfter(latest_, options_.lease, 0);
      if (news.latest != 0 && news.latest < latest_) {  // another store: its numbers begin again
        say("the manager's audit log begins anew");
        news = query_->auditAfter(0, options_.lease, 0);
      }
    }
    begun_ = true;
    if (news.latest != 0) latest_ = news.latest;
    std::vector<Happening> happened;
    happened.reserve(news.entries.size());
    for (pool::AuditEntry& one : news.entries) happened.push_back({name(one.event), std::move(one)});
    return happened;
  }

  const ClientOptions& client_;
  const EventsOptions& options_;
  std::unique_ptr<ManagerQuery> query_;  // null: the manager is away
  AuditNews audit_;                      // of the beginning, not yet told
  uint64_t latest_ = 0;
  bool begun_ = false, away_ = false;
  ServerWatch servers_;
};

}  // namespace

int runEvents(const Words& words) {
  ClientOptions client;
  EventsOptions own;
  const Parsed parsed = parseCommand(withOutput(words), kEventsHelp, &client, kAskingOptions, own.table());
  if (parsed.helped) return 0;
  if (!parsed.rest.empty()) throw options::OptionError("'" + parsed.rest[0] + "': no arguments are expected");
  own.check();
  Pursuit pursuit(client, own);
  const Interrupts interrupts;
  Printer printer(own);
  do {
    if (!printer.print(pursuit.look())) return 0;
  } while (own.follow && !interrupts.pause(kLook));
  return 0;
}

}  // namespace gpupool::cli
