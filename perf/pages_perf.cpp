// How fast a checkpoint in pages travels from a worker into its server's memory, and back to one that
// rebuilds the session: gigabytes a second. It needs no GPU.
//
//   perf-pages [--mib N] [--rounds N]
//
// The worker is a thread whose pages, no two alike, and checksums are there already; the one that rebuilds
// checks one part while the next one comes, as a worker does. Each round keeps a checkpoint in fresh memory.
// Medians of the rounds behind the first one. The second figure counts only the time that a core worked for
// the thread that receives, or sends: with enough cores, the rate can come near it. Takes twice N MiB.
#include <capnp/message.h>
#include <capnp/serialize.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <future>
#include <thread>
#include <vector>

#include "server/files/kept_pages.h"

namespace {

using namespace gpupool::server;
using gpupool::Digest;
using gpupool::Id;
using Bytes = std::vector<std::byte>;
using Clock = std::chrono::steady_clock;

long option(int argc, char** argv, const char* name, long otherwise) {
  for (int i = 1; i + 1 < argc; i += 2)
    if (std::strcmp(argv[i], name) == 0) return std::atol(argv[i + 1]);
  return otherwise;
}
double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}
[[noreturn]] void end(const std::string& why) {
  std::fprintf(stderr, "perf-pages: %s\n", why.c_str());
  std::exit(1);
}
void must(bool done, const StateSocket& socket) {
  if (!done) end(socket.error());
}

// A session of one piece of device memory.
struct Session {
  Bytes memory, record;
  std::vector<Checksum> checksums;

  explicit Session(size_t pages) : memory(pages * gpupool::server::kPageBytes), checksums(pages) {
    uint64_t word = 88172645463325252u;
    for (size_t at = 0; at < memory.size(); at += sizeof word) {
      word ^= word << 13, word ^= word >> 7, word ^= word << 17;
      std::memcpy(memory.data() + at, &word, sizeof word);
    }
    for (size_t i = 0; i < pages; ++i) checksums[i] = checksumOf(page(i));
    capnp::MallocMessageBuilder message;
    message.initRoot<gpupool::schema::SessionRecord>().initPieces(1)[0].setBytes(memory.size());
    const auto words = capnp::messageToFlatArray(message);
    const auto bytes = std::as_bytes(std::span(words.begin(), words.size()));
    record.assign(bytes.begin(), bytes.end());
  }
  std::span<const std::byte> page(size_t index) const {
    return std::span(memory).subspan(index * kPageBytes, kPageBytes);
  }
};

struct Ends {
  Ends() {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) end("no sockets");
    keeper = Descriptor(ends[0]);
    worker = Descriptor(ends[1]);
  }
  Descriptor keeper, worker;
};

StateSocket stateSocket(Descriptor end) {
  return {std::move(end), [] { return false; }};
}

void sendCheckpoint(StateSocket socket, const Session& session) {
  Bytes block;
  must(socket.receiveBlock(block, sizeof(Id)), socket);
  must(socket.sendBlock(session.record) && socket.send(gpupool::contentDigest(session.record)), socket);
  if (const std::string why = socket.hearAnswer(); !why.empty()) end(why);
  must(socket.receiveBlock(block, 0), socket);
  const PagesHeader header{Id(), Id::random()};
  const std::vector<uint64_t> places(session.checksums.size(), kNewPage);
  block.resize(sizeof header + places.size() * sizeof places[0]);
  std::memcpy(block.data(), &header, sizeof header);
  std::memcpy(block.data() + sizeof header, places.data(), block.size() - sizeof header);
  must(socket.sendBlock(block), socket);
  for (size_t i = 0; i < places.size(); ++i)
    must(socket.sendPart(session.page(i), session.checksums[i]), socket);
  if (const std::string why = socket.hearAnswer(); !why.empty()) end(why);
}

void rebuild(StateSocket socket, const Session& session) {
  Bytes block;
  Digest digest{};
  must(socket.receiveBlock(block, kMostRecordBytes) && socket.receive(digest), socket);
  must(socket.answer("") && socket.sendBlock({}) && socket.answer(""), socket);
  std::array<Bytes, 2> buffers;
  std::future<bool> checking;
  size_t buffer = 0;
  for (size_t left = session.memory.size(); left != 0; left -= buffers[buffer].size(), buffer ^= 1) {
    Bytes& part = buffers[buffer];
    part.resize(std::min(left, StateSocket::kPartBytes));
    Checksum checksum{};
    must(socket.receivePart(part, checksum), socket);
    if (checking.valid() && !checking.get()) end(kDamagedOnItsWay);
    checking = std::async(std::launch::async, [&part, checksum] { return checksumOf(part) == checksum; });
  }
  if (!checking.get()) end(kDamagedOnItsWay);
  must(socket.answer(""), socket);
}

double processorSeconds() {  // of this thread
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

// Of each round but the first.
struct Rates {
  std::vector<double> all, ofThread;
  void print(const char* what) const {
    std::printf("%s: %.2f GB/s; the server's thread at the socket could do %.2f\n", what, median(all),
                median(ofThread));
  }
};

template <class Ours, class Theirs>
void measure(Rates& rates, bool counts, uint64_t bytes, Ours&& ours, Theirs&& theirs) {
  Ends ends;
  const auto began = Clock::now();
  const double busy = processorSeconds();
  std::thread worker([&] { theirs(stateSocket(std::move(ends.worker))); });
  if (const std::string why = ours(std::move(ends.keeper)); !why.empty()) end(why);
  const std::chrono::duration<double> time = Clock::now() - began;
  const double thread = processorSeconds() - busy;
  worker.join();
  if (!counts) return;
  rates.all.push_back(static_cast<double>(bytes) / 1e9 / time.count());
  rates.ofThread.push_back(static_cast<double>(bytes) / 1e9 / thread);
}

}  // namespace

int main(int argc, char** argv) {
  const long mib = std::max(option(argc, argv, "--mib", 1024), 2L);
  const long rounds = std::max(option(argc, argv, "--rounds", 8), 2L);
  const Session session(static_cast<size_t>(mib) * 1024 * 1024 / kPageBytes);
  const uint64_t bytes = session.memory.size();
  Rates taken, played;
  for (long round = 0; round < rounds; ++round) {
    const auto store = PageStore::create({[](uint64_t) { return std::string(); }, [](uint64_t) {}});
    std::shared_ptr<const KeptPages> kept;
    const auto take = [&](const Descriptor& socket) {
      return takePages(socket, [] { return ""; }, *store, nullptr, kept);
    };
    const auto play = [&](Descriptor socket) {
      StateSocket state = stateSocket(std::move(socket));
      return playBack(state, *kept);
    };
    measure(taken, round != 0, bytes, take, [&](StateSocket s) { sendCheckpoint(std::move(s), session); });
    measure(played, round != 0, bytes, play, [&](StateSocket s) { rebuild(std::move(s), session); });
  }
  std::printf("%ld MiB, %u cores\n", mib, std::thread::hardware_concurrency());
  taken.print("into the server's memory");
  played.print("back to a worker");
  return 0;
}
