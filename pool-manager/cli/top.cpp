// gpupool top: the pool as it is, again every second.

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <iostream>
#include <memory>
#include <sstream>

#include "pool-manager/cli/command.h"
#include "pool-manager/cli/interrupts.h"
#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/places.h"
#include "pool-manager/cli/table.h"
#include "pool-manager/rpc.h"

namespace gpupool::cli {
namespace {

const Help kTopHelp = {
    "gpupool top [options]",
    "Shows the GPUs and the leases of the pool, and again every second, until Ctrl-C. In "
    "a terminal the screen "
    "is drawn anew, and shows as much as fits; otherwise plain tables follow one another.",
    "GPUPOOL_STATE: the folder of this machine's pool.",
    "0: ended by Ctrl-C, or after --count times. 1: no manager was reachable at first. 2: "
    "the command line is wrong.",
    "  gpupool top\n  gpupool top --count 1    # once, as devices -v and leases show it\n"};

struct TopOptions {
  std::chrono::milliseconds interval{1000};
  uint32_t count = 0;
  std::vector<options::Option> table() {
    return {{"interval", interval, "TIME", "How long to wait before the pool is asked again, 100ms at least.",
             true},
            {"count", count, "N", "End after N times. 0: go on.", true}};
  }
};

std::string plural(size_t count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

std::string summary(const std::vector<ListedServer>& servers, const std::vector<ListedDevice>& devices,
                    const pool::PoolView& view) {
  uint64_t leased = 0, leasable = 0;
  for (const ListedDevice& device : devices) leased += view.leased(device), leasable += view.leasable(device);
  const auto alive = std::count_if(servers.begin(), servers.end(), [](const auto& one) { return one.alive; });
  char clock[16];
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  std::strftime(clock, sizeof clock, "%H:%M:%S", localtime_r(&now, &local));
  return std::string(clock) + "  " + plural(servers.size(), "server") + ", " + std::to_string(alive) +
         " alive; " + plural(devices.size(), "GPU") + ", " + options::formatSize(leased) + " of " +
         options::formatSize(leasable) + " leased; " + plural(view.leases.size(), "lease") + "\n\n";
}

std::string look(ManagerQuery& query) {
  const auto devices = query.devices();
  const auto leases = query.leases();
  const auto servers = query.servers();
  const pool::PoolView view(leases, servers);
  std::ostringstream out;
  out << summary(servers, devices, view);
  printTable(deviceRows(devices, view, true), 0, out);
  if (leases.empty()) return std::move(out).str();
  std::vector<std::vector<std::string>> rows = {leaseHeading(false)};
  for (const pool::Lease& lease : leases) rows.push_back(leaseRow(lease, false));
  out << "\n";
  printTable(rows, 0, out);
  return std::move(out).str();
}

// The screen while this lives; else the terminal is as it was.
class Screen {
 public:
  explicit Screen(bool terminal) : terminal_(terminal) {
    if (terminal_) std::cout << "\033[?1049h\033[?25l" << std::flush;
  }
  ~Screen() {
    if (terminal_) std::cout << "\033[?25h\033[?1049l" << std::flush;
  }
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  void show(const std::string& text) {
    if (!terminal_) {
      std::cout << (shown_ ? "\n" : "") << text << std::flush;
      shown_ = true;
      return;
    }
    winsize size{};
    if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) size = {24, 80, 0, 0};
    std::istringstream lines(text);
    std::string all = "\033[H", line;
    for (unsigned row = 1; row < size.ws_row && std::getline(lines, line); ++row)
      all += cut(line, size.ws_col) + "\033[K\n";
    std::cout << all << "\033[J" << std::flush;
  }

 private:
  // Not within a character of UTF-8.
  static std::string cut(const std::string& line, size_t most) {
    size_t end = std::min(line.size(), most);
    while (end != 0 && end < line.size() && (static_cast<unsigned char>(line[end]) & 0xc0) == 0x80) --end;
    return line.substr(0, end);
  }

  bool terminal_, shown_ = false;
};

}  // namespace

int runTop(const Words& words) {
  ClientOptions client;
  TopOptions own;
  const Parsed parsed = parseCommand(words, kTopHelp, &client, kAskingOptions, own.table());
  if (parsed.helped) return 0;
  if (!parsed.rest.empty()) throw options::OptionError("'" + parsed.rest[0] + "': no arguments are expected");
  if (own.interval < std::chrono::milliseconds(100)) throw options::OptionError("--interval: 100ms at least");
  const auto connect = [&] { return std::make_unique<ManagerQuery>(client, 3000); };
  auto query = connect();  // fails before the screen is touched
  const Interrupts interrupts;
  Screen screen(::isatty(STDOUT_FILENO) != 0);
  for (uint32_t times = 1;; ++times) {
    try {
      if (query == nullptr) query = connect();
      screen.show(look(*query));
    } catch (const CommandError& error) {
      query = nullptr;
      screen.show(std::string(error.what()) + "\n");
    } catch (const kj::Exception& error) {  // the manager is away: it may come back
      query = nullptr;
      screen.show(pool::errorText(error) + "\n");
    }
    if (times == own.count || interrupts.pause(own.interval)) return 0;
  }
}

}  // namespace gpupool::cli
