// A bad wire between two network interfaces: forwards Ethernet frames from one to the other, both ways, with
// delay, jitter, loss, duplication, reordering, a bandwidth cap and partitions, all drawn from one seed. It
// stands between the namespaces of the network tests, so that they run alike on every kernel (sch_netem is a
// module that many kernels lack).
//
//   network-wire --plain IFACE...          turns checksum and segmentation offload of interfaces off, so that
//                                          what leaves them is what a wire would carry
//   network-wire LEFT RIGHT [--seed N] [--spin]
//                                          forwards; reads commands on stdin, one a line, until it ends.
//                                          --spin: it never sleeps, and adds less of its own to any delay
//     set [delay=US] [jitter=US] [loss=PERCENT] [duplicate=PERCENT] [reorder=PERCENT] [rate=KBIT]
//     [queue=BYTES]
//                                          what is not named is off; rate=0: as fast as it goes
//     cut both|left|right [port=N]         drops what comes from there; with a port, only its TCP segments
//     heal
//     stats                                prints one line of counts
//   Each command is answered by one line, once it holds.

#include <arpa/inet.h>
#include <linux/ethtool.h>
#include <linux/if_packet.h>
#include <linux/sockios.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <queue>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

// The kernel wakes a sleeper some tens of microseconds late. So much before a frame is due nobody sleeps: a
// delay of a few microseconds adds just these to what the wire takes by itself.
constexpr std::chrono::microseconds kAwake{100};

[[noreturn]] void die(const std::string& what) {
  std::fprintf(stderr, "network-wire: %s: %s\n", what.c_str(), std::strerror(errno));
  std::exit(1);
}

struct Conditions {
  double delayUs = 0, jitterUs = 0;
  double loss = 0, duplicate = 0, reorder = 0;  // percent
  double rateKbit = 0;
  double queueBytes = 64 << 10;
};

struct Counts {
  uint64_t forwarded = 0, lost = 0, duplicated = 0, reordered = 0, overflowed = 0, cut = 0;
};

struct Frame {
  Clock::time_point due;
  uint64_t order;  // frames due at one time leave in the order they came
  std::vector<unsigned char> bytes;
  bool operator>(const Frame& other) const {
    return due != other.due ? due > other.due : order > other.order;
  }
};

// TCP over IPv4 from or to the port.
bool concernsPort(const unsigned char* frame, size_t size, unsigned port) {
  constexpr size_t kIp = ETH_HLEN;
  if (size < kIp + 20 || frame[12] != 0x08 || frame[13] != 0x00 || frame[kIp + 9] != IPPROTO_TCP)
    return false;
  size_t tcp = kIp + size_t{4} * (frame[kIp] & 0xfu);
  if (size < tcp + 4) return false;
  unsigned source = frame[tcp] << 8 | frame[tcp + 1], target = frame[tcp + 2] << 8 | frame[tcp + 3];
  return source == port || target == port;
}

int openInterface(const char* name) {
  unsigned index = if_nametoindex(name);
  if (index == 0) die(name);
  int packets = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, htons(ETH_P_ALL));
  if (packets < 0) die("packet socket");
  sockaddr_ll address{};
  address.sll_family = AF_PACKET;
  address.sll_protocol = htons(ETH_P_ALL);
  address.sll_ifindex = static_cast<int>(index);
  if (bind(packets, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) die("bind");
  int bytes = 16 << 20;
  setsockopt(packets, SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof bytes);
  return packets;
}

// One direction.
class Way {
 public:
  Way(int from, int to, uint64_t seed) : from_(from), to_(to), random_(seed) {}

  int from() const { return from_; }
  const Counts& counts() const { return counts_; }
  void set(const Conditions& conditions) { conditions_ = conditions; }
  void cut(bool on, unsigned port) {
    cut_ = on;
    cutPort_ = port;
  }

  // Takes in what has arrived. At most so many at once, so that what is due is not kept waiting.
  void take() {
    unsigned char buffer[1 << 16];
    for (int i = 0; i < 64; ++i) {
      sockaddr_ll source{};
      socklen_t length = sizeof source;
      ssize_t size = recvfrom(from_, buffer, sizeof buffer, 0, reinterpret_cast<sockaddr*>(&source), &length);
      if (size < 0) return;
      if (source.sll_pkttype != PACKET_OUTGOING) accept(buffer, static_cast<size_t>(size));
    }
  }

  // Sends what is due; returns when the next frame is.
  Clock::time_point release() {
    while (!waiting_.empty() && waiting_.top().due <= Clock::now()) {
      const Frame& frame = waiting_.top();
      if (send(to_, frame.bytes.data(), frame.bytes.size(), 0) >= 0) ++counts_.forwarded;
      waiting_.pop();
    }
    return waiting_.empty() ? Clock::time_point::max() : waiting_.top().due;
  }

 private:
  bool happens(double percent) { return percent > 0 && draw_(random_) * 100 < percent; }

  void accept(const unsigned char* bytes, size_t size) {
    if (cut_ && (cutPort_ == 0 || concernsPort(bytes, size, cutPort_))) {
      ++counts_.cut;
      return;
    }
    if (happens(conditions_.loss)) {
      ++counts_.lost;
      return;
    }
    Clock::time_point now = Clock::now();
    Clock::time_point sent = now;
    if (conditions_.rateKbit > 0) {  // what stands before it in the queue leaves first
      if (free_ < now) free_ = now;
      double standing = std::chrono::duration<double>(free_ - now).count() * conditions_.rateKbit * 125;
      if (standing + static_cast<double>(size) > conditions_.queueBytes) {
        ++counts_.overflowed;
        return;
      }
      free_ += nanoseconds(static_cast<int64_t>(static_cast<double>(size) * 8e6 / conditions_.rateKbit));
      sent = free_;
    }
    double delay = conditions_.delayUs + conditions_.jitterUs * (2 * draw_(random_) - 1);
    Clock::time_point due = sent + nanoseconds(static_cast<int64_t>(std::max(delay, 0.0) * 1000));
    if (happens(conditions_.reorder)) {  // overtaken by what comes after it
      due += std::chrono::microseconds(500);
      ++counts_.reordered;
    } else {
      due = std::max(due, latest_);  // jitter alone does not reorder
      latest_ = due;
    }
    if (happens(conditions_.duplicate)) {
      waiting_.push({due, ++order_, {bytes, bytes + size}});
      ++counts_.duplicated;
    }
    waiting_.push({due, ++order_, {bytes, bytes + size}});
  }

  int from_, to_;
  std::mt19937_64 random_;
  std::uniform_real_distribution<double> draw_{0, 1};
  Conditions conditions_;
  Counts counts_;
  bool cut_ = false;
  unsigned cutPort_ = 0;
  uint64_t order_ = 0;
  Clock::time_point free_, latest_;
  std::priority_queue<Frame, std::vector<Frame>, std::greater<>> waiting_;
};

class Wire {
 public:
  Wire(int left, int right, uint64_t seed, bool spins)
      : left_(left, right, seed), right_(right, left, seed + 1), spins_(spins) {}

  int run() {
    for (;;) {
      Clock::time_point next = std::min(left_.release(), right_.release());
      pollfd watched[3] = {{left_.from(), POLLIN, 0}, {right_.from(), POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
      timespec pause{};
      timespec* bound = nullptr;
      if (spins_) {
        bound = &pause;
      } else if (next != Clock::time_point::max()) {
        auto left =
            std::max(nanoseconds(0), std::chrono::duration_cast<nanoseconds>(next - Clock::now() - kAwake));
        pause = {left.count() / 1'000'000'000, left.count() % 1'000'000'000};
        bound = &pause;
      }
      if (ppoll(watched, 3, bound, nullptr) < 0 && errno != EINTR) die("poll");
      if (watched[0].revents) left_.take();
      if (watched[1].revents) right_.take();
      if (watched[2].revents && !readCommands()) return 0;
    }
  }

 private:
  bool readCommands() {
    char bytes[4096];
    ssize_t size = read(STDIN_FILENO, bytes, sizeof bytes);
    if (size <= 0) return false;
    typed_.append(bytes, static_cast<size_t>(size));
    for (size_t end; (end = typed_.find('\n')) != std::string::npos; typed_.erase(0, end + 1)) {
      std::printf("%s\n", obey(typed_.substr(0, end)).c_str());
      std::fflush(stdout);
    }
    return true;
  }

  std::string obey(const std::string& line) {
    std::istringstream words(line);
    std::string verb, word, side;
    words >> verb;
    if (verb == "set") {
      Conditions conditions;
      while (words >> word)
        if (!setOne(conditions, word)) return "error: " + word;
      left_.set(conditions);
      right_.set(conditions);
      return "ok";
    }
    if (verb == "cut" || verb == "heal") {
      unsigned port = 0;
      words >> side;
      if (words >> word)
        port = static_cast<unsigned>(std::strtoul(word.c_str() + word.find('=') + 1, nullptr, 10));
      left_.cut(verb == "cut" && side != "right", port);
      right_.cut(verb == "cut" && side != "left", port);
      return "ok";
    }
    if (verb == "stats") {
      const Counts &a = left_.counts(), &b = right_.counts();
      std::ostringstream out;
      out << "forwarded=" << a.forwarded + b.forwarded << " lost=" << a.lost + b.lost
          << " duplicated=" << a.duplicated + b.duplicated << " reordered=" << a.reordered + b.reordered
          << " overflowed=" << a.overflowed + b.overflowed << " cut=" << a.cut + b.cut;
      return out.str();
    }
    return "error: " + line;
  }

  static bool setOne(Conditions& conditions, const std::string& word) {
    size_t equals = word.find('=');
    if (equals == std::string::npos) return false;
    const std::string name = word.substr(0, equals);
    double value = std::strtod(word.c_str() + equals + 1, nullptr);
    struct {
      const char* name;
      double& field;
    } fields[] = {{"delay", conditions.delayUs},   {"jitter", conditions.jitterUs},
                  {"loss", conditions.loss},       {"duplicate", conditions.duplicate},
                  {"reorder", conditions.reorder}, {"rate", conditions.rateKbit},
                  {"queue", conditions.queueBytes}};
    for (auto& field : fields)
      if (name == field.name) {
        field.field = value;
        return true;
      }
    return false;
  }

  Way left_, right_;
  const bool spins_;
  std::string typed_;
};

// A frame must leave its host complete: with its checksum, and no longer than the wire's unit.
void turnOffloadsOff(const char* name) {
  int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  for (uint32_t command : {ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO}) {
    ethtool_value off{command, 0};
    ifreq request{};
    std::strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    request.ifr_data = reinterpret_cast<char*>(&off);
    if (ioctl(control, SIOCETHTOOL, &request) != 0 && command != ETHTOOL_STSO)
      die(std::string("offloads of ") + name);
  }
  close(control);
}

}  // namespace

int main(int count, char** words) {
  if (count > 2 && std::string(words[1]) == "--plain") {
    for (int i = 2; i < count; ++i) turnOffloadsOff(words[i]);
    return 0;
  }
  const bool spins = count > 3 && std::string(words[count - 1]) == "--spin";
  if (spins) --count;
  if (count != 3 && !(count == 5 && std::string(words[3]) == "--seed")) {
    std::fprintf(stderr,
                 "usage: network-wire --plain IFACE... | network-wire LEFT RIGHT [--seed N] [--spin]\n");
    return 2;
  }
  uint64_t seed = count == 5 ? std::strtoull(words[4], nullptr, 10) : 1;
  std::printf("ok\n");
  std::fflush(stdout);
  return Wire(openInterface(words[1]), openInterface(words[2]), seed, spins).run();
}
