// How fast a checkpoint in pages travels from a worker into its server's memory, and back to one that
// rebuilds the session: gigabytes a second. It needs no GPU.
//
//   perf-pages [--mib N] [--rounds N] [--as-bytes 1]
//
// The worker is a thread whose pages, no two alike, and checksums are there already. It copies them to the
// memory that the server offers with several threads, in the place of a GPU, which takes no processor for
// that; the one that rebuilds compares parts with several threads, as a worker does, and copies them nowhere.
// --as-bytes: as with a worker that knows nothing of shared memory. Each round keeps a checkpoint in fresh
// memory. Medians of the rounds behind the first one: the rate, what it could be if the server's thread at
// the socket, of which only the time counts that a core worked for it, were the bound, and the time of
// processors that all threads of both took together for a gigabyte. Takes twice N MiB.
#include <capnp/message.h>
#include <capnp/serialize.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <thread>
#include <vector>

#include "base/ordered_work.h"
#include "server/files/kept_pages.h"
#include "server/worker/part_receiver.h"

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

bool asBytes = false;

void sendPages(StateSocket& socket, const Session& session) {
  const size_t pages = session.checksums.size();
  if (socket.room() == nullptr) {
    for (size_t i = 0; i < pages; ++i) must(socket.sendPart(session.page(i), session.checksums[i]), socket);
    return;
  }
  std::array<std::byte*, 16> places{};
  std::array<size_t, places.size()> which{};
  gpupool::OrderedWork copying(places.size(), gpupool::OrderedWork::helpers(), [&](size_t slot) {
    std::memcpy(places[slot], session.page(which[slot]).data(), kPageBytes);
    return std::string();
  });
  for (size_t i = 0; i < pages || !copying.empty();) {
    const size_t next = copying.next();
    if (i < pages && !copying.full() && (places[next] = socket.room()->take(kPageBytes)) != nullptr) {
      which[next] = i++;
      copying.give();
    } else if (copying.empty()) {
      must(socket.awaitRoom(), socket);
    } else {
      copying.await();
      const size_t slot = copying.oldest();
      must(socket.sendPart({places[slot], kPageBytes}, session.checksums[which[slot]]), socket);
      copying.drop();
    }
  }
  if (socket.sharedParts() != pages) end("the pages did not go through shared memory");
}

void sendCheckpoint(StateSocket socket, const Session& session) {
  Bytes block;
  must(socket.receiveBlock(block, sizeof(Id)), socket);
  must(socket.sendBlock(session.record) && socket.send(gpupool::contentDigest(session.record)), socket);
  if (const std::string why = asBytes ? socket.hearAnswer() : socket.hearOffer(); !why.empty()) end(why);
  must(socket.receiveBlock(block, 0), socket);
  const PagesHeader header{Id(), Id::random()};
  const std::vector<uint64_t> places(session.checksums.size(), kNewPage);
  block.resize(sizeof header + places.size() * sizeof places[0]);
  std::memcpy(block.data(), &header, sizeof header);
  std::memcpy(block.data() + sizeof header, places.data(), block.size() - sizeof header);
  must(socket.sendBlock(block), socket);
  sendPages(socket, session);
  if (const std::string why = socket.hearAnswer(); !why.empty()) end(why);
}

void rebuild(StateSocket socket, const Session& session) {
  Bytes block;
  Digest digest{};
  must(socket.receiveBlock(block, kMostRecordBytes) && socket.receive(digest), socket);
  must(socket.answer("") && socket.sendBlock({}), socket);
  const auto room = gpupool::transport::SharedMemory::create(10 * StateSocket::kPartBytes);
  must(socket.offerRoom(asBytes ? nullptr : room), socket);
  PartReceiver parts(socket, 5, gpupool::OrderedWork::helpers(), PartReceiver::placed);
  for (size_t left = session.memory.size(); left != 0 || !parts.empty();) {
    if (left != 0 && !parts.full()) {
      const size_t bytes = std::min(left, StateSocket::kPartBytes);
      must(parts.receive({room->data() + parts.next() * StateSocket::kPartBytes, bytes}), socket);
      left -= bytes;
    } else {
      if (const std::string why = parts.await(); !why.empty()) end(why);
      must(parts.drop(), socket);
    }
  }
  must(socket.answer(""), socket);
}

double processorSeconds(int who) {
  rusage used{};
  getrusage(who, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

// Of each round but the first.
struct Rates {
  std::vector<double> rates, ofThread, costs;
  void print(const char* what) const {
    std::printf(
        "%s: %.2f GB/s; the server's thread at the socket could do %.2f; %.2f s of processors for a GB\n",
        what, median(rates), median(ofThread), median(costs));
  }
};

template <class Ours, class Theirs>
void measure(Rates& rates, bool counts, uint64_t bytes, Ours&& ours, Theirs&& theirs) {
  Ends ends;
  const auto began = Clock::now();
  const double all = processorSeconds(RUSAGE_SELF), thread = processorSeconds(RUSAGE_THREAD);
  std::thread worker([&] { theirs(stateSocket(std::move(ends.worker))); });
  if (const std::string why = ours(std::move(ends.keeper)); !why.empty()) end(why);
  const std::chrono::duration<double> time = Clock::now() - began;
  const double ofThread = processorSeconds(RUSAGE_THREAD) - thread;
  worker.join();
  if (!counts) return;
  const double gigabytes = static_cast<double>(bytes) / 1e9;
  rates.rates.push_back(gigabytes / time.count());
  rates.ofThread.push_back(gigabytes / ofThread);
  rates.costs.push_back((processorSeconds(RUSAGE_SELF) - all) / gigabytes);
}

}  // namespace

int main(int argc, char** argv) {
  const long mib = std::max(option(argc, argv, "--mib", 1024), 2L);
  const long rounds = std::max(option(argc, argv, "--rounds", 8), 2L);
  asBytes = option(argc, argv, "--as-bytes", 0) != 0;
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
