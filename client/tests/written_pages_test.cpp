// Which pages of mirrored memory are compared: nothing that was written is missed, whoever writes it, and
// what is not written is left out.
#include "client/memory/written_pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "catch.h"
#include "client/memory/page_heat.h"
#include "schema/mirror.h"
#include "transports/shared_memory.h"

namespace gpupool::client {
namespace {

constexpr size_t kPage = WrittenPages::kPage, kPages = 64, kBytes = kPages * kPage;

bool available() {
  if (WrittenPages::get() != nullptr) return true;
  WARN("not tried: this kernel does not say which pages were written (Linux 6.7 does)");
  return false;
}

struct Memory {
  std::shared_ptr<transport::SharedMemory> memory = transport::SharedMemory::create(kBytes);
  std::byte* at(size_t page) const { return memory->data() + page * kPage; }
  uint64_t address() const { return reinterpret_cast<uint64_t>(memory->data()); }
};

// One side of a mirror, whose other side is `peer`.
struct Side {
  Memory own;
  std::vector<std::byte> peer = std::vector<std::byte>(kBytes);
  schema::MirrorBase base;
  PageHeat heat;
  std::vector<WrittenPages::Range> written;
  std::vector<unsigned char> runs = std::vector<unsigned char>(16 << 10);

  Side() { heat.begin(own.address(), kBytes); }
  void publish(bool cool, bool trusted = true) {
    REQUIRE(WrittenPages::get()->written(own.address(), kBytes, written));
    const bool candidates = heat.look(written, cool);
    do {
      const size_t bytes = base.collect(own.at(0), kBytes, runs, heat.pages(), PageHeat::kHot);
      schema::Reader in(std::as_bytes(std::span(runs).first(bytes)));
      while (in.remaining() >= 16) {
        const auto offset = in.value<uint64_t>();
        const auto data = in.blob();
        REQUIRE_FALSE(in.bad());
        std::memcpy(peer.data() + offset, data.data(), data.size());
      }
    } while (base.more());
    if (candidates) heat.settle(trusted);
  }
  bool agree() const { return std::memcmp(own.at(0), peer.data(), kBytes) == 0; }
  size_t cold() { return static_cast<size_t>(std::ranges::count(heat.pages(), 0)); }
  void cool() {
    for (int i = 0; i <= PageHeat::kHot; ++i) publish(i == PageHeat::kHot);
  }
};

void writeBySystemCall(std::byte* to, std::byte value) {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  CHECK(::write(ends[1], &value, 1) == 1);
  CHECK(::read(ends[0], to, 1) == 1);
  ::close(ends[0]);
  ::close(ends[1]);
}

}  // namespace

TEST_CASE("pages that are not written turn cold, and hot again when they are") {
  if (!available()) return;
  Side side;
  CHECK(side.cold() == 0);
  side.cool();
  CHECK(side.cold() == kPages);
  side.own.at(3)[17] = std::byte{1};
  writeBySystemCall(side.own.at(5), std::byte{2});
  std::thread([&] { side.own.at(7)[4095] = std::byte{3}; }).join();
  side.publish(false);
  CHECK(side.agree());
  CHECK(side.cold() == kPages - 3);
  side.cool();
  CHECK(side.cold() == kPages);
}

TEST_CASE("no page turns cold where devices may write") {
  if (!available()) return;
  Side side;
  for (int i = 0; i < 4 * PageHeat::kHot; ++i) side.publish(true, false);
  CHECK(side.cold() == 0);
  side.own.at(0)[0] = std::byte{1};
  side.publish(true, false);
  CHECK(side.agree());
}

TEST_CASE("whatever is written at whatever time reaches the other side") {
  if (!available()) return;
  Side side;
  std::minstd_rand random(getpid());
  size_t coldest = 0;
  for (int round = 0; round < 4000; ++round) {
    // Few pages change often, others once in a while, as in programs.
    const size_t page = random() % 16 != 0 ? random() % 4 : random() % kPages;
    std::byte* to = side.own.at(page) + random() % kPage;
    const auto value = static_cast<std::byte>(random());
    switch (random() % 8) {
      case 0:
        writeBySystemCall(to, value);
        break;
      case 1:
        std::thread([&] { *to = value; }).join();
        break;
      case 2:
        std::memset(side.own.at(page), static_cast<int>(value), (kPages - page) / 4 * kPage);
        break;
      case 3:
        *to = value;
        break;
      default:
        break;
    }
    side.publish(random() % 8 == 0);
    REQUIRE(side.agree());
    coldest = std::max(coldest, side.cold());
  }
  CHECK(coldest > kPages / 2);
}

TEST_CASE("memory that lies there instead is compared whole") {
  if (!available()) return;
  Side side;
  side.cool();
  void* const at = side.own.at(0);
  REQUIRE(::mmap(at, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at);
  side.own.at(9)[1] = std::byte{4};
  side.publish(true);
  CHECK(side.cold() == 0);
  CHECK(side.agree());
  side.cool();
  CHECK(side.cold() == 0);
}

TEST_CASE("a forked process can read it and not write to it") {
  if (!available()) return;
  Side side;
  side.own.at(2)[0] = std::byte{5};
  const auto child = [&](bool writes) {
    const pid_t process = ::fork();
    if (process == 0) {
      ::signal(SIGSEGV, SIG_DFL);  // Catch2's would report it
      if (writes) *const_cast<volatile std::byte*>(side.own.at(2)) = std::byte{6};
      ::_exit(static_cast<int>(*side.own.at(2)));
    }
    int status = 0;
    REQUIRE(::waitpid(process, &status, 0) == process);
    return status;
  };
  const int read = child(false), wrote = child(true);
  CHECK((WIFEXITED(read) && WEXITSTATUS(read) == 5));
  CHECK_FALSE((WIFEXITED(wrote) && WEXITSTATUS(wrote) == 6));
  CHECK(side.own.at(2)[0] == std::byte{5});
  side.own.at(2)[0] = std::byte{7};  // here it is as before
  side.publish(false);
  CHECK(side.agree());
}

TEST_CASE("a file without a cache is a device that may write to memory") {
  if (!WrittenPages::onlyProcessorsWrite()) {
    WARN("not tried: this process was started with something open that may write to its memory");
    return;
  }
  char name[] = "gpupool-direct-XXXXXX";
  const int plain = ::mkstemp(name);
  REQUIRE(plain >= 0);
  CHECK(WrittenPages::onlyProcessorsWrite());
  const int direct = ::open(name, O_RDWR | O_DIRECT);
  ::unlink(name);
  if (direct >= 0) {
    CHECK_FALSE(WrittenPages::onlyProcessorsWrite());
    ::close(direct);
  } else {
    WARN("not tried: no O_DIRECT in this folder");
  }
  ::close(plain);
  const int device = ::open("/dev/net/tun", O_RDWR);
  if (device >= 0) {
    CHECK_FALSE(WrittenPages::onlyProcessorsWrite());
    ::close(device);
  }
}

}  // namespace gpupool::client
