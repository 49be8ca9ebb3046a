// gpupool events: what happens to leases and servers, a line each, as it happens. It comes from the audit
// log, entry after entry, so that nothing is missed, also while the manager is started again.

#include <algorithm>
#include <chrono>
#include <iostream>
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
constexpr std::chrono::milliseconds kLook{500};

const Help kEventsHelp = {
    "gpupool events [options]",
    "Prints what happens to leases and servers from now on, a line each, until Ctrl-C: when, what, to which "
    "lease, where, on whose word, and why. The events are those of `gpupool audit`. While the manager is "
    "away it is tried again; what has happened meanwhile is told then. Of other tenants' leases it is not "
    "shown whose they are, nor why something happened. A manager that keeps no audit log (--audit-entries "
    "0) tells nothing. Times are of the manager's clock.",
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

class Printer {
 public:
  explicit Printer(const EventsOptions& options) : options_(options) {
    if (!options.output.json) line({"TIME", "EVENT", "LEASE", "WHERE", "TENANT", "HOLDER", "BY", "WHY"});
  }
  // False: nobody reads any more.
  bool print(const std::vector<pool::AuditEntry>& news) {
    for (const pool::AuditEntry& one : news)
      if (wanted(one)) print(one);
    return static_cast<bool>(std::cout.flush());
  }

 private:
  bool wanted(const pool::AuditEntry& entry) const {
    // "node7", or of a lease "node7 GPUs 0,1".
    const bool there = entry.server == options_.server || entry.server.starts_with(options_.server + " ");
    return (options_.server.empty() || there) &&
           (options_.lease.empty() ||
            (entry.lease != Id{} && entry.lease.text().starts_with(options_.lease)));
  }
  void print(const pool::AuditEntry& entry) {
    if (options_.output.json) {
      std::cout << pool::dump(pool::toJson(entry), -1) << '\n';
      return;
    }
    line({timeText(entry.timeMs), name(entry.event), entry.lease == Id{} ? "" : shortId(entry.lease),
          entry.server, entry.tenant, entry.holder, entry.by, entry.reason});
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

// The audit log from some entry on.
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
  std::vector<pool::AuditEntry> look() {
    try {
      if (query_ == nullptr) connect();
      std::vector<pool::AuditEntry> news = fromAudit();
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

  std::vector<pool::AuditEntry> fromAudit() {
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
    return std::move(news.entries);
  }

  const ClientOptions& client_;
  const EventsOptions& options_;
  std::unique_ptr<ManagerQuery> query_;  // null: the manager is away
  AuditNews audit_;                      // of the beginning, not yet told
  uint64_t latest_ = 0;
  bool begun_ = false, away_ = false;
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
