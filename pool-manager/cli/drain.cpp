// gpupool drain: nothing new on a server, what is there goes to other servers, and what is there still. The
// manager does it (pool-manager/drains.h); this begins it, looks, and says what has become of it.

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <map>
#include <set>
#include <utility>

#include "pool-manager/cli/command.h"
#include "pool-manager/cli/holder.h"
#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/places.h"
#include "pool-manager/cli/table.h"

namespace gpupool::cli {
namespace {

using pool::DrainState;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr unsigned kStoreMs = 10'000, kLookMs = 3000;
constexpr useconds_t kBetweenUs = 500'000;
constexpr milliseconds kLeave =
    std::chrono::seconds(10);  // a server gives up what has moved away within this

const Help kDrain = {
    "gpupool drain [options] SERVER",
    "Cordons a server, so that no new lease is placed on it (see `gpupool cordon --help`), has its leases "
    "moved to other servers, one after the other, as far as they can be moved and there is room (see "
    "`gpupool migrate --help`), and lists those that are there still; with --wait it waits for their end, "
    "and those that stay are tried again every minute. It ends none of them: `gpupool release` does. A "
    "suspended lease is not moved, for its memory is with the server. The manager moves them: interrupted "
    "(^C), this command asks it to begin no further move; killed, it leaves that to the manager, which "
    "goes on as long as --wait says, or until `gpupool uncordon`, also when it has been started again. "
    "Asked again, it begins again. The "
    "server stays cordoned, whatever the command says: `gpupool uncordon` puts it back into service. Only "
    "the pool's operator can.",
    "GPUPOOL_STATE: the folder of this machine's pool.",
    "0: the server has no lease any more, and can be stopped. 1: leases are there still, or it cannot be "
    "done. 2: the command line is wrong. Interrupted, it ends by that signal.",
    "  gpupool drain node7\n  gpupool drain --wait 8h --reason 'a new fan' node7 && ssh node7 poweroff\n"};

volatile sig_atomic_t interruptedBy = 0;
void interrupt(int signal) { interruptedBy = signal; }

// The first SIGINT or SIGTERM is noted from now on; the second one ends the process.
void noteInterrupts() {
  struct sigaction action{};
  action.sa_handler = interrupt;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

struct Drain {
  std::string server, reason;
  milliseconds wait{0};
  bool stay = false;  // its leases are not moved
};

using Leases = std::vector<pool::DrainedLease>;
using Connect = std::function<ManagerQuery(unsigned limitMs)>;

std::string count(size_t leases) { return std::to_string(leases) + (leases == 1 ? " lease" : " leases"); }

class Draining {
 public:
  Draining(Drain drain, Connect connect) : drain_(std::move(drain)), connect_(std::move(connect)) {}

  // What is there when there is nothing any more, or no time; or when it is interrupted. A manager that is
  // away meanwhile is waited for, too, and asked anew: its store may have lost what it was asked last.
  Leases run() {
    until_ = steady_clock::now() + drain_.wait;
    for (bool begun = false; interruptedBy == 0; ::usleep(kBetweenUs)) {
      DrainState state;
      try {
        state = begun ? connect_(kLookMs).drainState(drain_.server, seen_) : begin();
        begun = true;
      } catch (const std::exception&) {  // kj's, too
        if (!asked_ || steady_clock::now() >= std::max(until_, heard_ + kLeave)) throw;
        begun = false;
        continue;
      }
      asked_ = true;
      heard_ = steady_clock::now();
      tell(state);
      if (!state.cordoned)
        throw CommandError(kExitFailure, "server " + drain_.server +
                                             " is not cordoned any more: new leases may be placed on it");
      if (isOver(state)) return state.leases;
    }
    return {};
  }

  // Returns when the manager knows.
  void stop() { connect_(kLookMs).stopDrain(drain_.server); }

 private:
  DrainState begin() {
    if (asked_) tell(connect_(kLookMs).drainState(drain_.server, seen_));  // what was said meanwhile
    const auto left =
        std::max(milliseconds(0), std::chrono::duration_cast<milliseconds>(until_ - steady_clock::now()));
    DrainState state = connect_(kStoreMs).drain(drain_.server, asked_ ? "" : drain_.reason, userAndHost(),
                                                static_cast<uint64_t>(left.count()), drain_.stay);
    seen_ = state.latest;
    state.words.clear();  // of those who have asked before
    return state;
  }

  bool isOver(const DrainState& state) {
    if (state.leases.empty()) return true;
    if (state.moving) {
      moving_ = true;
      return false;
    }
    const bool leave = std::all_of(state.leases.begin(), state.leases.end(),
                                   [](const pool::DrainedLease& lease) { return lease.leaves; });
    if (std::exchange(moving_, false) && leave) until_ = std::max(until_, steady_clock::now() + kLeave);
    if (steady_clock::now() >= until_) return true;
    if (std::exchange(told_, state.leases.size()) != state.leases.size() && drain_.wait.count() != 0)
      std::cout << "gpupool: waiting for the end of " << count(state.leases.size()) << "\n" << std::flush;
    return false;
  }

  // One line each, and another one only when there is news.
  void tell(const DrainState& state) {
    for (const pool::DrainWord& word : state.words) {
      seen_ = word.number;
      const std::string said = (word.moved ? "moved to " : "stays: ") + word.text;
      if (std::exchange(said_[word.lease], said) != said)
        std::cout << "gpupool: lease " << shortId(word.lease) << " " << said << "\n" << std::flush;
    }
  }

  const Drain drain_;
  const Connect connect_;
  steady_clock::time_point until_, heard_;
  bool asked_ = false;   // the manager has once begun
  bool moving_ = false;  // as it last said
  uint64_t seen_ = 0;
  size_t told_ = 0;
  std::map<Id, std::string> said_;
};

// Ends by the signal. With --no-move nothing was begun, and others' moves go on.
[[noreturn]] void endInterrupted(Draining& draining, const Drain& drain) {
  const std::string& server = drain.server;
  try {
    if (!drain.stay) draining.stop();
    std::cerr << "gpupool: interrupted: " << (drain.stay ? "" : "no further lease is moved; ") << "server "
              << server << " stays cordoned\n";
  } catch (const std::exception&) {
    std::cerr << "gpupool: interrupted, and the manager does not answer: it may go on moving leases; server "
              << server << " stays cordoned\n";
  }
  std::cout.flush();
  ::signal(interruptedBy, SIG_DFL);
  ::raise(interruptedBy);
  ::_exit(128 + interruptedBy);
}

}  // namespace

int runDrain(const Words& words) {
  ClientOptions client;
  Drain drain;
  const Parsed parsed = parseCommand(
      words, kDrain, &client, kAskingOptions,
      {{"wait", drain.wait, "TIME", "How long to wait for the end of the leases. 0: look once. At most 20d.",
        true},
       {"reason", drain.reason, "TEXT",
        "Why, as of `gpupool cordon`. Empty: that of before, if the server is cordoned already.", true},
       {"no-move", drain.stay, "", "Moves no lease.", true}});
  if (parsed.helped) return 0;
  if (drain.wait > kMostWait) throw options::OptionError("--wait: at most 20d");
  if (parsed.rest.size() != 1 || parsed.rest[0].empty())
    throw options::OptionError("one server is expected; `gpupool servers` lists them");
  checkReason(drain.reason);
  drain.server = parsed.rest[0];
  const Connect connect = [&](unsigned limitMs) { return ManagerQuery(client, limitMs); };
  noteInterrupts();
  Draining draining(drain, connect);
  const Leases leases = draining.run();
  if (interruptedBy != 0) endInterrupted(draining, drain);
  if (leases.empty()) {
    std::cout << "gpupool: server " << drain.server << " is cordoned and has no leases\n";
    return 0;
  }
  std::cout << "gpupool: server " << drain.server << " is cordoned and has " << count(leases.size())
            << " still:\n";
  std::set<Id> there;
  for (const pool::DrainedLease& lease : leases) there.insert(lease.id);
  std::vector<std::vector<std::string>> rows = {leaseHeading(false)};
  for (const pool::Lease& lease : connect(kStoreMs).leases())
    if (there.contains(lease.id)) rows.push_back(leaseRow(lease, false));
  std::cout.flush();
  printTable(rows);
  return kExitFailure;
}

}  // namespace gpupool::cli
