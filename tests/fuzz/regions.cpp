// The bootstrap socket of shm: records that arrive in pieces, with descriptors that are not what they claim;
// the tables behind them; and the rings' sizes that a worker names.
//
// Input: pieces {u8 bits 0-2: descriptor (kinds below), u8 length, bytes}; after each, what has come is
// served and mapped.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <vector>

#include "base/descriptor_passing.h"
#include "tests/fuzz/input.h"
#include "transports/bootstrap.h"
#include "transports/regions.h"
#include "transports/ring.h"

namespace {

using namespace gpupool;
using namespace gpupool::transport;

// -1, a good memfd of a page, one that can shrink, one that cannot be written, a larger good one, no memory.
const std::vector<int>& descriptors() {
  static const auto* all = [] {
    auto memory = [](size_t bytes, int seals) {
      int file = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
      if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) __builtin_trap();
      if (fcntl(file, F_ADD_SEALS, seals) != 0) __builtin_trap();
      return file;
    };
    constexpr int good = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    return new std::vector<int>{-1,
                                memory(4096, good),
                                memory(4096, F_SEAL_GROW),
                                memory(4096, good | F_SEAL_WRITE),
                                memory(5 * 4096, good),
                                open("/dev/null", O_RDWR | O_CLOEXEC)};
  }();
  return *all;
}

bool say(int socket, std::span<const std::byte> bytes, int attached) {
  const int both[] = {attached, attached};  // twice: a record has one
  return sendWithDescriptors(socket, bytes, {both, attached >= 0 ? std::size(both) : 0}, MSG_DONTWAIT) > 0;
}

// As connectShm's.
void openRings(const Record& hello, const Descriptor& file) {
  if (hello.kind != RecordKind::hello || !file) return;
  try {
    Options offered;
    offered.callBytes = hello.size;
    offered.controlBytes = hello.extra;
    const auto sizes = RingMemory::sizes(offered);
    auto backing = SharedMemory::adopt(fcntl(file.get(), F_DUPFD_CLOEXEC, 0), RingMemory::totalBytes(sizes));
    RingMemory rings(backing->descriptor(), sizes);
    for (int ring = 0; ring < 2 * kChannels; ++ring)
      rings.data(ring)[2 * rings.size(ring) - 1] = std::byte{1};
  } catch (const std::runtime_error&) {
  }
}

// As Shm::map. False: the peer is lost.
bool mapRegion(RemoteRegions& regions, Region region) {
  auto entry = regions.wait(region, Clock::now());
  if (!entry || entry->mapping || entry->descriptor == nullptr) return true;
  try {
    auto mapping = SharedMemory::adopt(fcntl(entry->descriptor->get(), F_DUPFD_CLOEXEC, 0), entry->size);
    mapping->data()[mapping->size() - 1] = std::byte{1};
    regions.remember(region, std::move(mapping));
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) __builtin_trap();
  Descriptor peer(ends[0]);
  Bootstrap bootstrap(ends[1]);
  RemoteRegions regions;
  for (int pieces = 0; pieces < 64 && !input.empty(); ++pieces) {
    const size_t which = input.value<uint8_t>() % descriptors().size();
    auto bytes = input.take(std::max<size_t>(input.value<uint8_t>(), 1));
    if (bytes.empty() || !say(peer.get(), bytes, descriptors()[which])) break;
    Record record;
    Descriptor attached;
    while (bootstrap.poll(record, attached) == Bootstrap::Got::record) {
      openRings(record, attached);
      if (record.kind == RecordKind::goodbye || record.kind == RecordKind::hello) continue;
      if (!applyRecord(regions, record, std::move(attached))) return 0;
      if (!mapRegion(regions, {record.id, record.generation})) return 0;
    }
  }
  return 0;
}
