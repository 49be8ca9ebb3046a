// Checkpoints in pages, from a session that works between them: what travels, and that it is all that has
// changed.
#include <poll.h>

#include <set>

#include "server/files/kept_pages.h"
#include "server/worker/contents.h"
#include "server/worker/tests/mover.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

#define ROW(name) schema::RowOf<name>::id

namespace {

constexpr uint64_t kArray = makeHandle(handles::Kind::array, 1, 1);
constexpr char kGivenUp[] =
    "its pages were given up: the program has needed their memory, or has ended their context";

// ---- the hash, as the header says it, on this processor

uint64_t rotated(uint64_t value, int by) { return value << by | value >> (64 - by); }
uint64_t mixed(uint64_t value) {
  value = (value ^ value >> 33) * 0xC2B2AE3D27D4EB4F;
  value = (value ^ value >> 29) * 0x165667B19E3779F9;
  return value ^ value >> 32;
}
Checksum hashOf(const std::vector<std::byte>& page) {
  const auto a = [](uint64_t& chain, uint64_t word) {
    chain = rotated(chain + word * 0xC2B2AE3D27D4EB4F, 31) * 0x9E3779B185EBCA87;
  };
  const auto b = [](uint64_t& chain, uint64_t word) {
    chain = rotated(chain + word * 0x85EBCA77C2B2AE63, 27) * 0x165667B19E3779F9;
  };
  uint64_t sums[2] = {};
  for (uint64_t thread = 0; thread < 256; ++thread) {
    uint64_t first = (thread + 1) * 0x27D4EB2F165667C5, second = first * 0x9E3779B185EBCA87;
    for (uint64_t at = thread * 16; at < page.size(); at += 4096) {
      uint64_t words[2];
      std::memcpy(words, page.data() + at, sizeof words);
      a(first, words[0]), a(first, words[1]);
      b(second, words[1]), b(second, words[0]);
    }
    sums[0] += mixed(first);
    sums[1] += mixed(second);
  }
  Checksum hash;
  std::memcpy(hash.data(), sums, sizeof sums);
  return hash;
}

// ---- a session and its keeper

struct Store {
  std::shared_ptr<PageStore> pages =
      PageStore::create({[](uint64_t) { return std::string(); }, [](uint64_t) {}});
  std::shared_ptr<const KeptPages> kept;
};

struct Program {
  // onDevice: that hashes.
  explicit Program(bool onDevice = true) : client(softDriver(), nullptr, -1, &overNetwork), mover(client) {
    if (onDevice) client.session->hashers().want();
    client.open();
    base = client.space().deviceBase;
  }
  void run(uint32_t row, const Arguments& arguments) {
    REQUIRE(client.await(row, arguments).status() == CUDA_SUCCESS);
  }
  void map(uint64_t at, uint64_t bytes) {
    run(ROW("sessionExtentMap"), Arguments().value(0).value(base + at).value(bytes));
  }
  void unmap(uint64_t at) { run(ROW("sessionExtentUnmap"), Arguments().value(base + at)); }
  void set(uint64_t at, uint64_t bytes, unsigned value) {
    run(ROW("cuMemsetD8Async"), Arguments().value(base + at).value(value).value(bytes).value(0));
    run(ROW("sessionDrain"), Arguments().value(0).value(1));
  }
  // Every page other than the others.
  void fill(uint64_t at, uint64_t bytes) {
    for (uint64_t i = 0; i < bytes; i += kMiB)
      run(ROW("cuMemsetD32Async"),
          Arguments().value(base + at + i).value(at + i + 1).value(kMiB / 4).value(0));
    run(ROW("sessionDrain"), Arguments().value(0).value(1));
  }
  // A checkpoint; the program's error. here: its pages go through shared memory.
  std::string checkpoint(Store& store, bool here = true) {
    const auto [mine, theirs] = here ? connectionHere() : connection();
    std::shared_ptr<const KeptPages> made;
    std::thread keeper([&, theirs = theirs] {
      const Descriptor socket(theirs);
      takePages(socket, [] { return ""; }, *store.pages, store.kept.get(), made);
    });
    outcome = mover.copyPages(mine);
    keeper.join();
    if (made == nullptr) return outcome.error;
    CHECK((made->shared != 0) == (here && outcome.movedBytes != 0));
    store.kept = made;
    return outcome.error;
  }

  Client client;
  Mover mover;
  uint64_t base = 0;
  MoveOutcome outcome;
};

std::vector<std::byte> bytesOf(const PageStore::Pages& pages) {
  std::vector<std::byte> all, page;
  for (const auto& one : pages) {
    page.resize(one->bytes());
    CHECK(one->read(page) == "");
    all.insert(all.end(), page.begin(), page.end());
  }
  return all;
}

size_t newPages(const KeptPages& before, const KeptPages& now) {
  const std::set<std::shared_ptr<const PageStore::Page>> known(before.contents.begin(),
                                                               before.contents.end());
  size_t count = 0;
  for (const auto& page : now.contents) count += known.contains(page) ? 0 : 1;
  return count;
}

// What is kept is what the session has: another keeper, which has nothing, gets the same.
void checkKept(Program& program, Store& store) {
  Store other;
  REQUIRE(program.checkpoint(other, false) == "");
  CHECK(program.outcome.movedBytes == bytesOf(other.kept->contents).size());
  const bool same = bytesOf(store.kept->contents) == bytesOf(other.kept->contents);
  CHECK(same);
  store = other;
}

// Passes on what goes either way, but no more than `most` bytes from the keeper to the worker, and what goes
// to the keeper only when `opens` says so.
class Between {
 public:
  explicit Between(
      uint64_t most, std::function<bool()> opens = [] { return true; })
      : left_(most), opens_(std::move(opens)) {
    std::tie(workers, worker_) = connection();
    std::tie(keepers, keeper_) = connection();
    thread_ = std::thread([this] { run(); });
  }
  ~Between() { thread_.join(); }
  int workers = -1, keepers = -1;  // their ends, for them to take

 private:
  void run() {
    std::vector<char> room(1 << 16);
    pollfd waiting[2] = {{worker_, POLLIN, 0}, {keeper_, POLLIN, 0}};
    for (bool passes = true; passes;) {
      const bool opened = opens_();
      waiting[0].fd = opened ? worker_ : -1;
      if (poll(waiting, 2, opened ? -1 : 5) < 0) break;
      if (waiting[0].revents != 0) passes = pass(worker_, keeper_, room, room.size());
      if (passes && waiting[1].revents != 0) {
        passes = left_ != 0 && pass(keeper_, worker_, room, left_);
        left_ -= std::min(left_, passed_);
      }
    }
    close(worker_);
    close(keeper_);
  }
  bool pass(int from, int to, std::vector<char>& room, uint64_t most) {
    const ssize_t got = recv(from, room.data(), std::min<uint64_t>(room.size(), most), 0);
    if (got <= 0) return false;
    passed_ = static_cast<uint64_t>(got);
    return ::send(to, room.data(), passed_, MSG_NOSIGNAL) == got;
  }
  int worker_ = -1, keeper_ = -1;
  uint64_t left_, passed_ = 0;
  const std::function<bool()> opens_;
  std::thread thread_;
};

// A checkpoint whose pages are on their way until `meanwhile` has been done by the program. Its error.
std::string during(Program& program, Store& store, const std::function<void()>& meanwhile) {
  std::atomic<bool> opens{false};
  Between between(UINT64_MAX, [&] { return opens.load(); });
  std::shared_ptr<const KeptPages> made;
  std::thread keeper([&] {
    const Descriptor socket(between.keepers);
    takePages(socket, [] { return ""; }, *store.pages, store.kept.get(), made);
  });
  {
    const Course course(program.client);
    program.mover.beginCopyPages(between.workers);
  }  // it has been told that it stays
  meanwhile();
  opens = true;
  const MoveOutcome outcome = program.mover.outcome();
  keeper.join();
  if (made != nullptr) store.kept = made;
  return outcome.error;
}

std::vector<std::byte> deviceBytes(Program& program) {
  Session& session = *program.client.session;
  session.makeAnyCurrent();
  std::vector<std::byte> all;
  const auto stock = session.space().takeStock();
  for (size_t i = 0; i < stock.size(); ++i) {
    std::vector<std::byte> bytes(stock[i].bytes);
    CUdeviceptr address = 0;
    CHECK(session.space().openPiece(i, address) == CUDA_SUCCESS);
    CHECK(softDriver().cuMemcpyDtoH_v2(bytes.data(), address, bytes.size()) == CUDA_SUCCESS);
    session.space().closePiece(i, address);
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  softDriver().cuCtxSetCurrent(nullptr);
  return all;
}

// Of a session without pinned memory, variables and arrays: the device's memory is what comes last.
bool keeps(const Store& store, const std::vector<std::byte>& device) {
  const auto bytes = bytesOf(store.kept->contents);
  return bytes.size() >= device.size() &&
         std::equal(device.begin(), device.end(), bytes.end() - device.size());
}

}  // namespace

TEST_CASE("pages: a device's hash of them is the one that the header tells of") {
  const Driver& driver = softDriver();
  CUcontext context = nullptr;
  REQUIRE(driver.cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
  REQUIRE(driver.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS);
  {
    constexpr size_t kPages = 5;
    CUdeviceptr memory = 0;
    REQUIRE(driver.cuMemAlloc_v2(&memory, kPages * kPageBytes) == CUDA_SUCCESS);
    std::vector<std::vector<std::byte>> pages(kPages, std::vector<std::byte>(kPageBytes));
    for (size_t i = 0; i < kPageBytes; ++i) pages[1][i] = static_cast<std::byte>(i * 7 + i / 256);
    pages[2] = pages[1];
    pages[2].back() ^= std::byte{1};
    pages[3] = pages[1];
    std::swap_ranges(pages[3].begin(), pages[3].begin() + 16, pages[3].begin() + 4096 + 16);
    pages[4] = pages[1];
    std::swap_ranges(pages[4].begin(), pages[4].begin() + 8, pages[4].begin() + 8);
    for (size_t i = 0; i < kPages; ++i)
      CHECK(driver.cuMemcpyHtoD_v2(memory + i * kPageBytes, pages[i].data(), kPageBytes) == CUDA_SUCCESS);
    PageHasher hasher(driver);
    REQUIRE(hasher.prepare() == CUDA_SUCCESS);
    std::vector<Checksum> hashes(kPages);
    REQUIRE(hasher.begin(memory, std::span(hashes).first(2)) == CUDA_SUCCESS);
    REQUIRE(hasher.begin(memory + uint64_t{2} * kPageBytes, std::span(hashes).subspan(2)) == CUDA_SUCCESS);
    REQUIRE(hasher.finish() == CUDA_SUCCESS);
    for (size_t i = 0; i < kPages; ++i) {
      CAPTURE(i);
      CHECK(hashes[i] == hashOf(pages[i]));
    }
    CHECK(std::set<Checksum>(hashes.begin(), hashes.end()).size() == kPages);
    CHECK(driver.cuMemFree_v2(memory) == CUDA_SUCCESS);
  }
  driver.cuCtxPopCurrent_v2(&context);
  driver.cuDevicePrimaryCtxRelease_v2(0);
}

TEST_CASE("pages: only those travel that have changed, and what is kept is what the session has") {
  for (const bool onDevice : {true, false}) {
    CAPTURE(onDevice);
    Program program(onDevice);
    program.map(0, 2 * kMiB);
    program.map(2 * kMiB, 30 * kMiB);
    program.fill(0, 32 * kMiB);
    Store store;
    REQUIRE(program.checkpoint(store) == "");
    CHECK(program.outcome.movedBytes >= 36 * kMiB);  // with staging memory
    auto before = store.kept;
    program.set(32 * kMiB - 1, 1, 0xee);  // the last byte of the last page of an extent
    REQUIRE(program.checkpoint(store) == "");
    CHECK(newPages(*before, *store.kept) <= 2);  // and that of the words
    CHECK(program.outcome.movedBytes <= uint64_t{2} * kPageBytes);
    checkKept(program, store);
    // The end of one extent and the beginning of the next, and memory that is new.
    before = store.kept;
    program.set(2 * kMiB - 1, 2, 0xee);
    program.map(40 * kMiB, 4 * kMiB);
    program.set(40 * kMiB, 4 * kMiB, 0x11);
    REQUIRE(program.checkpoint(store) == "");
    CHECK(newPages(*before, *store.kept) <= 5);
    checkKept(program, store);
  }
}

TEST_CASE("pages: memory that was freed and allocated anew at its address is new memory") {
  Program program;
  program.map(0, 8 * kMiB);
  program.map(8 * kMiB, 8 * kMiB);
  program.fill(0, 16 * kMiB);
  Store store;
  REQUIRE(program.checkpoint(store) == "");
  program.unmap(0);
  program.map(0, 8 * kMiB);
  program.set(0, 4 * kMiB, 0);
  REQUIRE(program.checkpoint(store) == "");
  checkKept(program, store);
  // What lay there before, elsewhere, and only some of it: nothing but where it is has changed.
  const auto before = store.kept;
  program.unmap(8 * kMiB);
  program.map(24 * kMiB, 6 * kMiB);
  program.fill(8 * kMiB + 16 * kMiB, 6 * kMiB);
  REQUIRE(program.checkpoint(store) == "");
  checkKept(program, store);
}

TEST_CASE("pages: pinned memory and arrays") {
  Program program;
  const uint64_t pinned = program.client.space().hostBase + kMiB;
  program.run(ROW("sessionHostMap"), Arguments().value(pinned).value(3 * kMiB).value(0).value(1));
  const CUDA_ARRAY_DESCRIPTOR shape{700, 900, CU_AD_FORMAT_FLOAT, 1};
  program.run(ROW("cuArrayCreate_v2"), Arguments().value(kArray).value(1).structure(shape));
  Session& session = *program.client.session;
  CUarray array = nullptr;
  REQUIRE(session.objects().find(kArray, array));
  std::vector<std::byte> bytes(size_t{700} * 900 * 4, std::byte{3});
  const auto put = [&] {
    session.makeAnyCurrent();
    CHECK(copyArray(softDriver(), array, bytes, false) == CUDA_SUCCESS);
    softDriver().cuCtxSetCurrent(nullptr);
  };
  put();
  Store store;
  REQUIRE(program.checkpoint(store) == "");
  auto before = store.kept;
  bytes.back() = std::byte{4};
  put();
  session.space().hostPieces().at(pinned)->data()[3 * kMiB - 1] = std::byte{9};
  REQUIRE(program.checkpoint(store) == "");
  CHECK(newPages(*before, *store.kept) <= 3);
  checkKept(program, store);
  // The array goes, and its bytes with it.
  program.run(ROW("cuArrayDestroy"), Arguments().value(kArray));
  REQUIRE(program.checkpoint(store) == "");
  checkKept(program, store);
}

TEST_CASE("pages: variables are read together, in their order, with some that are too large for that") {
  for (const bool onDevice : {true, false}) {
    CAPTURE(onDevice);
    Program program(onDevice);
    program.map(0, 32 * kMiB);
    program.fill(0, 32 * kMiB);
    Session& session = *program.client.session;
    uint64_t context = 0;
    session.objects().forEach(HandleKind::context, [&](uint64_t id, uint64_t) { context = id; });
    REQUIRE(context != 0);
    const std::vector<std::byte> all = deviceBytes(program);
    Contents contents;
    std::vector<std::byte> expected;
    // 16 MiB are more than the memory through which they are read together, 7 MiB of two are too much.
    for (const auto& [at, bytes] : {std::pair{uint64_t{4}, uint64_t{4}},
                                    {5 * kMiB, 7 * kMiB},
                                    {0, 7 * kMiB},
                                    {8 * kMiB, 16 * kMiB},
                                    {3, 1},
                                    {31 * kMiB, kMiB}}) {
      contents.variables.push_back({1, context, "of " + std::to_string(bytes), program.base + at, bytes});
      expected.insert(expected.end(), all.begin() + static_cast<ptrdiff_t>(at),
                      all.begin() + static_cast<ptrdiff_t>(at + bytes));
    }
    std::vector<std::byte> got;
    std::vector<std::string> names;
    const auto take = [&](const std::string& name, std::span<const std::byte> bytes) {
      names.push_back(name.substr(0, name.find(" of 0x")));
      got.insert(got.end(), bytes.begin(), bytes.end());
      return std::string();
    };
    CHECK(readContents(session, contents, take) == "");
    const bool same = got == expected;
    CHECK(same);
    REQUIRE(names.size() == contents.variables.size());
    for (size_t i = 0; i < names.size(); ++i) CHECK(names[i] == "variable " + contents.variables[i].name);
    CHECK(readContents(session, contents, [](const auto&, auto) { return "enough"; }) == "enough");
    softDriver().cuCtxSetCurrent(nullptr);
  }
}

TEST_CASE("pages: an answer that is lost, a keeper that goes in the middle, and one that has started anew") {
  Program program;
  program.map(0, 32 * kMiB);
  program.fill(0, 32 * kMiB);
  Store store;
  REQUIRE(program.checkpoint(store) == "");
  const auto through = [&](uint64_t most) {
    Between between(most);
    std::shared_ptr<const KeptPages> made;
    std::thread keeper([&] {
      const Descriptor socket(between.keepers);
      takePages(socket, [] { return ""; }, *store.pages, store.kept.get(), made);
    });
    const MoveOutcome outcome = program.mover.copyPages(between.workers);
    keeper.join();
    CHECK_FALSE(outcome.error.empty());
    return made;
  };
  // What it names, an answer, no names of images: but for the last answer the worker hears all.
  constexpr uint64_t kAllButTheLast = 24 + 8 + 8;
  program.set(5 * kMiB, 1, 0xee);
  const auto made = through(kAllButTheLast);
  REQUIRE(made != nullptr);
  const auto before = store.kept = made;
  program.set(9 * kMiB, 1, 0xee);
  REQUIRE(program.checkpoint(store) == "");
  CHECK(newPages(*before, *store.kept) <= 2);
  checkKept(program, store);
  // The next one does not come, twice: the one that is held is still known.
  for (const uint64_t most : {24, 24 + 8}) {
    program.set(11 * kMiB, 1, static_cast<unsigned>(most));
    CHECK(through(most) == nullptr);
  }
  REQUIRE(program.checkpoint(store) == "");
  CHECK(program.outcome.movedBytes <= uint64_t{2} * kPageBytes);
  checkKept(program, store);
  // It names none, or one that this worker has not sent.
  Store anew;
  REQUIRE(program.checkpoint(anew) == "");
  CHECK(program.outcome.movedBytes >= 36 * kMiB);
  store = anew;
  auto foreign = std::make_shared<KeptPages>(*store.kept);
  foreign->id.low ^= 1;
  store.kept = foreign;
  REQUIRE(program.checkpoint(store) == "");
  CHECK(program.outcome.movedBytes >= 36 * kMiB);
}

TEST_CASE("pages: a program goes on while they are on their way, and they are those of the moment before") {
  Program program;
  program.map(0, 8 * kMiB);
  program.map(8 * kMiB, 8 * kMiB);
  program.fill(0, 16 * kMiB);
  Store store;
  auto then = deviceBytes(program);
  CHECK(during(program, store, [&] {
          program.set(0, 16 * kMiB, 0xcc);
          program.unmap(0);
        }) == "");
  CHECK(keeps(store, then));
  program.fill(8 * kMiB, 3 * kMiB);
  program.map(16 * kMiB, 2 * kMiB);
  program.set(16 * kMiB, 2 * kMiB, 5);
  then = deviceBytes(program);
  CHECK(during(program, store, [&] { program.set(8 * kMiB, 8 * kMiB, 0xdd); }) == "");
  CHECK(keeps(store, then));
  CHECK(program.client.session->space().physicalBytes(0) == 10 * kMiB);
}

TEST_CASE("pages: the driver does not get back the addresses at which they were aside") {
  constexpr CUdeviceptr kAside = 0x4800'0000'0000;
  Program program;
  program.map(0, 8 * kMiB);
  program.fill(0, 8 * kMiB);
  Store store;
  REQUIRE(during(program, store, [] {}) == "");
  const Driver& driver = program.client.session->driver();
  CUdeviceptr given = 0;
  REQUIRE(driver.cuMemAddressReserve(&given, 2 * kMiB, 0, kAside, 0) == CUDA_SUCCESS);
  CHECK(given != kAside);
  driver.cuMemAddressFree(given, 2 * kMiB);
}

TEST_CASE(
    "pages: a program that needs the memory in which its pages are gets it, and is checkpointed later") {
  Program program;
  program.map(0, 30 * kMiB);
  program.fill(0, 30 * kMiB);
  Store store;
  CHECK(during(program, store, [&] { program.map(32 * kMiB, 30 * kMiB); }) == kGivenUp);
  CHECK(store.kept == nullptr);
  program.set(32 * kMiB, 30 * kMiB, 7);
  REQUIRE(program.checkpoint(store) == "");
  CHECK(keeps(store, deviceBytes(program)));
  CHECK(program.client.session->hasReclaimedSpare());
}

TEST_CASE("pages: a context that ends while they are on their way") {
  Program program;
  program.map(0, 8 * kMiB);
  program.fill(0, 8 * kMiB);
  Store store;
  CHECK(during(program, store,
               [&] { program.run(ROW("cuDevicePrimaryCtxReset_v2"), Arguments().value(0)); }) == kGivenUp);
  program.run(ROW("cuDevicePrimaryCtxRetain"), Arguments().value(kContext).value(0));
  program.set(0, kMiB, 7);
  REQUIRE(program.checkpoint(store) == "");
  CHECK(keeps(store, deviceBytes(program)));
  CHECK_FALSE(program.client.session->hasReclaimedSpare());
}
