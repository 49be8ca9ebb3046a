// perf-manager: simulated servers and holders of a real manager, over its real protocol; perf/manager starts
// both.
//
// Servers join, beat, and take every lease. Their beats have what those of real servers have whose leases are
// all in use: samples of the devices, counts and use of each lease, texts of some. Holders keep `leases`
// leases at a time, `rate` times a second release the oldest one and ask for another. One thread, one KJ
// loop; each server has a connection of its own, as real ones do, and the holders share some. Half-open peers
// are silent or have sent a part of a message; those that the manager sends away come again.

#include <fcntl.h>
#include <kj/async-io.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "pool-manager/convert.h"
#include "pool-manager/rpc.h"
#include "schema/device_sample.h"

namespace gpupool::perf {
namespace {

constexpr size_t kHolderConnections = 16;
constexpr kj::Duration kAnswerWithin = 30 * kj::SECONDS;
constexpr unsigned kOneIsHindered = 10;
constexpr double kMostMiB = 300, kLeastOfRate = 0.995;

struct Wanted {
  std::string address;
  unsigned servers = 100, devices = 8, leases = 400, rate = 200, seconds = 30;
  unsigned halfOpen = 0;
  std::string halfOpenAddress;
  double mostP99Ms = 25;
  int manager = 0;  // its process
};

// Of one server: which leases it has.
class Control final : public schema::ServerControl::Server {
 public:
  explicit Control(std::set<Id>& leases) : leases_(leases) {}

 protected:
  kj::Promise<void> grant(GrantContext context) override {
    leases_.insert(pool::read(context.getParams().getLease().getId()));
    return kj::READY_NOW;
  }
  kj::Promise<void> revoke(RevokeContext context) override {
    leases_.erase(pool::read(context.getParams().getId()));
    return kj::READY_NOW;
  }

 private:
  std::set<Id>& leases_;
};

struct Figures {
  std::vector<double> grantMs;
  uint64_t grants = 0, releases = 0, failures = 0, beats = 0, lateBeats = 0;
  double ownDelayMs = 0;  // the most by which this program's own clock was late
};

double msBetween(kj::TimePoint from, kj::TimePoint to) {
  return static_cast<double>((to - from) / kj::MICROSECONDS) / 1000;
}

class LoadedServer {
 public:
  LoadedServer(kj::AsyncIoContext& io, const Wanted& wanted, unsigned number, Figures& figures)
      : timer_(io.provider->getTimer()), figures_(figures) {
    facts_.name = "node" + std::to_string(number);
    facts_.incarnation = Id::random();
    facts_.localPath = "/nowhere";
    facts_.bootId = pool::bootId();
    for (uint32_t i = 0; i < wanted.devices; ++i) {
      Device device;
      const Id uuid = Id::random();
      device.uuid.assign(reinterpret_cast<const char*>(&uuid), 16);
      device.name = "Simulated GPU";
      device.memoryBytes = uint64_t{80} << 30;
      device.ordinal = i;
      facts_.devices.push_back(device);
    }
    connection_ = pool::connectManager(*io.provider, wanted.address, kAnswerWithin).wait(io.waitScope);
    auto join = connection_->manager().joinRequest();
    pool::write(facts_, join.initInfo());
    join.setControl(kj::heap<Control>(leases_));
    auto reports = join.initReports(wanted.devices);
    (void)reports;
    beatMs_ = timer_.timeoutAfter(kAnswerWithin, join.send()).wait(io.waitScope).getBeatMs();
    beat().wait(io.waitScope);
  }

  // first: when the next one is due. Servers beat at random moments (server/front/membership.cpp); these, one
  // after the other.
  kj::Promise<void> beats(kj::Duration first) {
    return timer_.afterDelay(first).then([this] { return beat(); }).then([this] {
      return beats(beatMs_ * kj::MILLISECONDS);
    });
  }
  kj::Duration beatEvery() const { return beatMs_ * kj::MILLISECONDS; }

 private:
  // Late: the manager has answered when the next one is due already.
  kj::Promise<void> beat() {
    auto request = connection_->manager().beatRequest();
    request.setName(facts_.name);
    pool::write(facts_.incarnation, request.initIncarnation());
    auto list = request.initActiveLeases(static_cast<unsigned>(leases_.size()));
    unsigned at = 0;
    for (const Id& id : leases_) pool::write(id, list[at++]);
    request.initProblems(static_cast<unsigned>(facts_.devices.size()));
    ++beats_;
    writeUse(request);
    return request.send().then([this, sent = timer_.now()](auto&& answer) {
      ++figures_.beats;
      if (msBetween(sent, timer_.now()) > beatMs_ || !answer.getKnown()) ++figures_.lateBeats;
    });
  }

  // As server/front/membership.cpp: all of it, in each beat.
  void writeUse(schema::Manager::BeatParams::Builder beat) {
    const auto count = static_cast<unsigned>(leases_.size());
    auto counts = beat.initCounts(count);
    auto uses = beat.initUses(count);
    std::vector<Id> hindered;
    unsigned at = 0;
    for (const Id& id : leases_) {
      if (std::hash<std::string>()(id.text()) % kOneIsHindered == 0) hindered.push_back(id);
      pool::write(id, counts[at].initId());
      counts[at].setCalls(beats_ * 40'000);
      counts[at].setAwaited(beats_ * 300);
      counts[at].setToDeviceBytes(beats_ << 24);
      counts[at].setFromDeviceBytes(beats_ << 20);
      pool::write(id, uses[at].initId());
      uses[at].setSessions(1);
      uses[at].setWanted(true);
      ++at;
    }
    auto hindrances = beat.initHindrances(static_cast<unsigned>(hindered.size()));
    for (unsigned i = 0; i < hindrances.size(); ++i) {
      pool::write(hindered[i], hindrances[i].initId());
      hindrances[i].initReasons(1).set(0, "cannot be moved: process 4711 has a green context");
      hindrances[i].initProtection(1).set(0, "is protected for 5m: the last checkpoint is 12 s old");
    }
    auto samples = beat.initSamples(static_cast<unsigned>(facts_.devices.size()));
    for (unsigned i = 0; i < samples.size(); ++i) {
      DeviceSample sample;
      sample.gpuPercent = static_cast<int32_t>((beats_ + i) % 100);
      sample.memoryPercent = sample.gpuPercent / 2;
      sample.usedBytes = uint64_t{8} << 30;
      sample.totalBytes = uint64_t{80} << 30;
      sample.temperatureC = 60;
      sample.powerMw = 400'000;
      schema::write(sample, samples[i]);
    }
  }

  kj::Timer& timer_;
  Figures& figures_;
  uint64_t beats_ = 0;
  pool::Server facts_;
  std::set<Id> leases_;
  kj::Own<pool::ManagerConnection> connection_;
  uint32_t beatMs_ = 0;
};

class Load final : private kj::TaskSet::ErrorHandler {
 public:
  Load(kj::AsyncIoContext& io, const Wanted& wanted)
      : io_(io), timer_(io.provider->getTimer()), wanted_(wanted), tasks_(*this) {}
  ~Load() noexcept {}

  // False: a target is not met.
  bool run() {
    for (unsigned i = 0; i < wanted_.servers; ++i) {
      servers_.push_back(std::make_unique<LoadedServer>(io_, wanted_, i, figures_));
      LoadedServer& server = *servers_.back();
      tasks_.add(server.beats(server.beatEvery() * static_cast<int64_t>(i) / wanted_.servers));
    }
    for (size_t i = 0; i < kHolderConnections; ++i)
      holders_.push_back(
          pool::connectManager(*io_.provider, wanted_.address, kAnswerWithin).wait(io_.waitScope));
    while (held_.size() < wanted_.leases) {
      const size_t before = held_.size();
      auto batch = kj::heapArrayBuilder<kj::Promise<void>>(std::min<size_t>(64, wanted_.leases - before));
      while (!batch.isFull()) batch.add(lease());
      kj::joinPromises(batch.finish()).wait(io_.waitScope);
      if (held_.size() == before) throw std::runtime_error("the manager grants nothing");
    }
    if (wanted_.halfOpen != 0) {
      halfOpenAddress_ = io_.provider->getNetwork().parseAddress(wanted_.halfOpenAddress).wait(io_.waitScope);
      for (unsigned i = 0; i < wanted_.halfOpen; ++i) tasks_.add(halfOpen(i));
      timer_.afterDelay(kj::SECONDS).wait(io_.waitScope);
    }
    return measure();
  }

 private:
  bool measure() {
    figures_ = {};
    const double cpuBefore = cpuSeconds();
    const kj::TimePoint begin = timer_.now();
    tasks_.add(churn(begin, 0));
    timer_.afterDelay(wanted_.seconds * kj::SECONDS).wait(io_.waitScope);
    return print(msBetween(begin, timer_.now()) / 1000, cpuSeconds() - cpuBefore);
  }

  // Silent, or with a part of a message: its header says that there is one segment of 64 words, none of which
  // follows. When the manager closes the connection, the peer comes again.
  kj::Promise<void> halfOpen(unsigned number) {
    return halfOpenAddress_->connect()
        .then([number](kj::Own<kj::AsyncIoStream> stream) {
          static constexpr kj::byte kHeader[] = {0, 0, 0, 0, 64, 0, 0, 0};
          static kj::byte answer[64];
          kj::Promise<void> sent =
              number % 2 == 0 ? kj::Promise<void>(kj::READY_NOW) : stream->write(kHeader, sizeof kHeader);
          auto& current = *stream;
          return sent.then([&current] { return current.tryRead(answer, 1, sizeof answer).ignoreResult(); })
              .attach(kj::mv(stream));
        })
        .catch_([](kj::Exception&&) {})
        .then([this] { return timer_.afterDelay(100 * kj::MILLISECONDS); })
        .then([this, number] { return halfOpen(number); });
  }

  schema::Manager::Client holder() { return holders_[next_++ % holders_.size()]->manager(); }

  kj::Promise<void> lease() {
    pool::LeaseRequest wish;
    wish.id = Id::random();
    wish.memoryBytes = uint64_t{8} << 30;
    wish.ttlMs = 3'600'000;
    wish.turns.idleMs = 3'600'000;
    wish.holder = "load";
    auto request = holder().leaseRequest();
    pool::write(wish, request.initRequest());
    return timer_.timeoutAfter(kAnswerWithin, request.send())
        .then([this, id = wish.id, asked = timer_.now()](auto&&) {
          held_.push_back(id);
          ++figures_.grants;
          figures_.grantMs.push_back(msBetween(asked, timer_.now()));
        })
        .catch_([this](kj::Exception&& error) {
          if (++figures_.failures < 4) std::fprintf(stderr, "%s\n", pool::errorText(error).c_str());
        });
  }

  kj::Promise<void> swap() {
    if (held_.empty()) return lease();
    const Id id = held_.front();
    held_.pop_front();
    auto request = holder().releaseRequest();
    pool::write(id, request.initId());
    return timer_.timeoutAfter(kAnswerWithin, request.send())
        .then([this](auto&&) {
          ++figures_.releases;
          return lease();
        })
        .catch_([this](kj::Exception&&) { ++figures_.failures; });
  }

  // By the clock, whether or not the ones before have been answered.
  kj::Promise<void> churn(kj::TimePoint begin, uint64_t done) {
    const auto due = static_cast<uint64_t>(msBetween(begin, timer_.now()) * wanted_.rate / 1000);
    for (; done < due; ++done) tasks_.add(swap());
    const kj::TimePoint next = timer_.now() + 5 * kj::MILLISECONDS;
    return timer_.atTime(next).then([this, begin, done, next] {
      figures_.ownDelayMs = std::max(figures_.ownDelayMs, msBetween(next, timer_.now()));
      return churn(begin, done);
    });
  }

  // MiB and seconds of the manager's process, as /proc says.
  double memoryMiB() const {
    std::ifstream status("/proc/" + std::to_string(wanted_.manager) + "/status");
    for (std::string line; std::getline(status, line);)
      if (line.starts_with("VmHWM:")) return std::strtod(line.c_str() + 6, nullptr) / 1024;
    return 0;
  }

  // Of the manager's process, of all its threads, so far.
  double cpuSeconds() const {
    std::ifstream stat("/proc/" + std::to_string(wanted_.manager) + "/stat");
    std::string line, word;
    std::getline(stat, line);
    std::istringstream fields(line.substr(std::min(line.size(), line.rfind(')') + 2)));
    double ticks = 0;
    for (int field = 3; field <= 15 && fields >> word; ++field)
      if (field >= 14) ticks += std::strtod(word.c_str(), nullptr);
    return ticks / static_cast<double>(::sysconf(_SC_CLK_TCK));
  }

  bool print(double seconds, double cpu) {
    auto& times = figures_.grantMs;
    std::sort(times.begin(), times.end());
    const auto part = [&](double p) {
      return times.empty() ? 0
                           : times[std::min(times.size() - 1,
                                            static_cast<size_t>(p * static_cast<double>(times.size())))];
    };
    const double grants = static_cast<double>(figures_.grants) / seconds,
                 releases = static_cast<double>(figures_.releases) / seconds, p99 = part(0.99),
                 memory = memoryMiB();
    std::printf("| %u | %u | %u | %llu | %llu | %.1f | %.1f | %.1f | %.1f | %llu | %.0f | %.1f | %.0f |\n",
                wanted_.servers, wanted_.devices, wanted_.leases,
                static_cast<unsigned long long>(figures_.beats),
                static_cast<unsigned long long>(figures_.lateBeats), grants, releases, part(0.5), p99,
                static_cast<unsigned long long>(figures_.failures), memory, cpu, figures_.ownDelayMs);
    const double least = wanted_.rate * kLeastOfRate;
    const bool met = figures_.lateBeats == 0 && figures_.failures == 0 && grants >= least &&
                     releases >= least && p99 <= wanted_.mostP99Ms && memory <= kMostMiB;
    if (!met)
      std::printf(
          "not met: no late beats, no failures, %.1f grants and releases/s, p99 of %.0f ms, %.0f MiB\n",
          least, wanted_.mostP99Ms, kMostMiB);
    return met;
  }

  void taskFailed(kj::Exception&& error) override {
    std::fprintf(stderr, "perf-manager: %s\n", pool::errorText(error).c_str());
    ++figures_.lateBeats;  // a server that beats no more
  }

  kj::AsyncIoContext& io_;
  kj::Timer& timer_;
  const Wanted wanted_;
  Figures figures_;
  std::vector<std::unique_ptr<LoadedServer>> servers_;
  std::vector<kj::Own<pool::ManagerConnection>> holders_;
  std::deque<Id> held_;
  size_t next_ = 0;
  kj::Own<kj::NetworkAddress> halfOpenAddress_;
  kj::TaskSet tasks_;
};

Wanted wantedOf(int count, char** words) {
  Wanted wanted;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = words[i];
    const auto number = static_cast<unsigned>(std::strtoul(words[i + 1], nullptr, 10));
    if (name == "--address")
      wanted.address = words[i + 1];
    else if (name == "--servers")
      wanted.servers = number;
    else if (name == "--devices")
      wanted.devices = number;
    else if (name == "--leases")
      wanted.leases = number;
    else if (name == "--rate")
      wanted.rate = number;
    else if (name == "--seconds")
      wanted.seconds = number;
    else if (name == "--half-open")
      wanted.halfOpen = number;
    else if (name == "--half-open-address")
      wanted.halfOpenAddress = words[i + 1];
    else if (name == "--most-p99")
      wanted.mostP99Ms = std::strtod(words[i + 1], nullptr);
    else if (name == "--manager")
      wanted.manager = static_cast<int>(number);
    else
      throw std::invalid_argument("there is no option " + name);
  }
  if (wanted.address.empty() || wanted.devices == 0 || wanted.devices > pool::kMaxDevices ||
      wanted.servers == 0)
    throw std::invalid_argument("--address, and --devices of 1 to 64, are needed: see perf/manager");
  return wanted;
}

}  // namespace
}  // namespace gpupool::perf

int main(int count, char** words) {
  try {
    const auto wanted = gpupool::perf::wantedOf(count, words);
    auto io = kj::setupAsyncIo();
    const bool met = gpupool::perf::Load(io, wanted).run();
    std::fflush(stdout);
    ::_exit(met ? 0 : 1);  // the connections of a thousand servers need not be taken down one by one
  } catch (const kj::Exception& error) {
    std::fprintf(stderr, "perf-manager: %s\n", gpupool::pool::errorText(error).c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "perf-manager: %s\n", error.what());
  }
  return 1;
}
