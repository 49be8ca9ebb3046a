// A worker that says what no worker would: it is cut off, or refused, and nobody else sees anything of it.
#include "support.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <random>

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

// A worker's end, and messages by hand.
class Raw {
 public:
  explicit Raw(Descriptor socket) : socket_(std::move(socket)) {}

  bool send(CopierMessage message, std::span<const std::byte> behind = {}, std::span<const int> with = {}) {
    std::vector<std::byte> bytes(sizeof message + behind.size());
    std::memcpy(bytes.data(), &message, sizeof message);
    if (!behind.empty()) std::memcpy(bytes.data() + sizeof message, behind.data(), behind.size());
    return sendWithDescriptors(socket_, bytes, with) == static_cast<ssize_t>(bytes.size());
  }
  bool plan(std::vector<CopierPlanned> pieces) {
    return send(of(CopierVerb::plan, pieces.size()), std::as_bytes(std::span<const CopierPlanned>(pieces)));
  }
  bool batch(CopierVerb verb, std::vector<uint32_t> indices, std::vector<int> with) {
    std::vector<CopierPlaced> placed;
    placed.reserve(indices.size());
    for (const uint32_t index : indices) placed.push_back({index, 0});
    if (verb == CopierVerb::bringIn)
      return send(of(verb, placed.size()), std::as_bytes(std::span<const CopierPlaced>(placed)), with);
    return send(of(verb, indices.size()), std::as_bytes(std::span<const uint32_t>(indices)), with);
  }
  bool across(const std::vector<CopierCrossing>& crossings, const std::vector<int>& with) {
    return send(of(CopierVerb::across, crossings.size()),
                std::as_bytes(std::span<const CopierCrossing>(crossings)), with);
  }
  static CopierMessage of(CopierVerb verb, size_t count) {
    return {kCopierMagic, verb, 5, static_cast<uint32_t>(count)};
  }
  // "done", what was refused, or "cut": the copier has closed the connection.
  std::string hear() {
    pollfd waiting{socket_, POLLIN, 0};
    if (poll(&waiting, 1, 30'000) <= 0) return "nothing";
    std::vector<std::byte> room(kCopierDatagram);
    const auto received = receiveWithDescriptors(socket_, room);
    if (received.bytes < static_cast<ssize_t>(sizeof(CopierMessage))) return "cut";
    CopierMessage message;
    std::memcpy(&message, room.data(), sizeof message);
    if (message.verb == CopierVerb::done) return "done";
    return std::string(reinterpret_cast<const char*>(room.data() + sizeof message), message.count);
  }
  bool reserveOne() { return plan({{0, 1}}) && send(of(CopierVerb::reserve, 1)) && hear() == "done"; }
  int socket() const { return socket_; }

 private:
  Descriptor socket_;
};

struct Piece {
  Piece() : memory(std::vector<CopierPiece>{{0, kUnit}}) {
    memory.createAll();
    exported = Descriptor(memory.exportPiece(0));
  }
  Memory memory;
  Descriptor exported;
};

}  // namespace

TEST_CASE("a batch for which the copier has no descriptors left is refused, and may come again") {
  TestCopier copier;
  constexpr uint32_t kCount = 64;
  Memory memory(std::vector<CopierPiece>(kCount, {0, kUnit}));
  memory.createAll();
  memory.fill(3);
  Raw raw(copier.connect());
  REQUIRE(raw.plan(std::vector<CopierPlanned>(kCount, {0, 1})));
  REQUIRE(raw.send(Raw::of(CopierVerb::reserve, kCount)));
  REQUIRE(raw.hear() == "done");
  std::vector<uint32_t> indices;
  std::vector<int> exported;
  std::vector<Descriptor> owners;
  for (uint32_t index = 0; index < kCount; ++index) {
    indices.push_back(index);
    exported.push_back(memory.exportPiece(index));
    owners.emplace_back(exported.back());
  }
  rlimit limit{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  rlimit low = limit;
  low.rlim_cur = static_cast<rlim_t>(exported.back()) + kCount / 2;
  REQUIRE(setrlimit(RLIMIT_NOFILE, &low) == 0);
  REQUIRE(raw.batch(CopierVerb::takeOut, indices, exported));
  const std::string refused = raw.hear();
  REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  CHECK(refused.find("no file descriptors left") != std::string::npos);
  REQUIRE(raw.batch(CopierVerb::takeOut, indices, exported));
  CHECK(raw.hear() == "done");
}

TEST_CASE("whoever breaks the protocol is cut off") {
  using Breach = std::function<void(Raw&, Piece&)>;
  const auto verb = [](CopierVerb v, size_t count = 0) { return Raw::of(v, count); };
  const std::vector<std::byte> eight(8);
  const std::vector<std::pair<const char*, Breach>> breaches{
      {"short", [&](Raw& raw, Piece&) { CHECK(write(raw.socket(), "x", 1) == 1); }},
      {"long", [&](Raw& raw,
                   Piece&) { raw.send(verb(CopierVerb::plan, 1), std::vector<std::byte>(kCopierDatagram)); }},
      {"another version", [&](Raw& raw, Piece&) { raw.send({kCopierMagic + 1, CopierVerb::reserve, 1, 0}); }},
      {"no verb", [&](Raw& raw, Piece&) { raw.send(verb(CopierVerb{99})); }},
      {"an answer", [&](Raw& raw, Piece&) { raw.send(verb(CopierVerb::done)); }},
      {"empty plan", [&](Raw& raw, Piece&) { raw.plan({}); }},
      {"piece of nothing", [&](Raw& raw, Piece&) { raw.plan({{0, 0}}); }},
      {"piece too large", [&](Raw& raw, Piece&) { raw.plan({{0, ~0u}}); }},
      {"plan shorter than its count", [&](Raw& raw, Piece&) { raw.send(verb(CopierVerb::plan, 2), eight); }},
      {"count that overflows",
       [&](Raw& raw, Piece&) { raw.send(verb(CopierVerb::plan, 0x80000001u), eight); }},
      {"reserve of nothing", [&](Raw& raw, Piece&) { raw.send(verb(CopierVerb::reserve, 0)); }},
      {"reserve of others",
       [&](Raw& raw, Piece&) {
         raw.plan({{0, 1}});
         raw.send(verb(CopierVerb::reserve, 2));
       }},
      {"out before room", [&](Raw& raw, Piece& p) { raw.batch(CopierVerb::takeOut, {0}, {p.exported}); }},
      {"begin before room", [&](Raw& raw, Piece&) { raw.send(verb(CopierVerb::beginBringIn)); }},
      {"in before room", [&](Raw& raw, Piece& p) { raw.batch(CopierVerb::bringIn, {0}, {p.exported}); }},
      {"nothing across", [&](Raw& raw, Piece&) { raw.across({}, {}); }},
      {"a piece of nothing across",
       [&](Raw& raw, Piece& p) { raw.across({{0, 1, 0}}, {p.exported, p.exported}); }},
      {"a piece too large across",
       [&](Raw& raw, Piece& p) { raw.across({{0, 1, ~0u}}, {p.exported, p.exported}); }},
      {"a descriptor too few across", [&](Raw& raw, Piece& p) { raw.across({{0, 1, 1}}, {p.exported}); }},
      {"too many across",
       [&](Raw& raw, Piece&) {
         raw.across(std::vector<CopierCrossing>(kMostInCrossing + 1, {0, 1, 1}), {});
       }},
      {"plan with descriptors",
       [&](Raw& raw, Piece& p) { raw.send(verb(CopierVerb::plan, 1), eight, std::vector<int>{p.exported}); }},
  };
  const std::vector<std::pair<const char*, Breach>> afterReserve{
      {"reserve twice", [&](Raw& raw, Piece&) { raw.send(verb(CopierVerb::reserve, 1)); }},
      {"plan too late", [&](Raw& raw, Piece&) { raw.plan({{0, 1}}); }},
      {"no descriptor", [&](Raw& raw, Piece&) { raw.batch(CopierVerb::takeOut, {0}, {}); }},
      {"two descriptors",
       [&](Raw& raw, Piece& p) { raw.batch(CopierVerb::takeOut, {0}, {p.exported, p.exported}); }},
      {"more than reserved", [&](Raw& raw, Piece& p) { raw.batch(CopierVerb::takeOut, {1}, {p.exported}); }},
      {"twice in a batch",
       [&](Raw& raw, Piece& p) { raw.batch(CopierVerb::takeOut, {0, 0}, {p.exported, p.exported}); }},
      {"in before out",
       [&](Raw& raw, Piece& p) {
         raw.send(verb(CopierVerb::beginBringIn));
         CHECK(raw.hear() == "done");
         raw.batch(CopierVerb::bringIn, {0}, {p.exported});
       }},
      {"in not begun",
       [&](Raw& raw, Piece& p) {
         raw.batch(CopierVerb::takeOut, {0}, {p.exported});
         CHECK(raw.hear() == "done");
         raw.batch(CopierVerb::bringIn, {0}, {p.exported});
       }},
      {"out twice",
       [&](Raw& raw, Piece& p) {
         raw.batch(CopierVerb::takeOut, {0}, {p.exported});
         CHECK(raw.hear() == "done");
         raw.batch(CopierVerb::takeOut, {0}, {p.exported});
       }},
      {"out after in",
       [&](Raw& raw, Piece& p) {
         raw.send(verb(CopierVerb::beginBringIn));
         CHECK(raw.hear() == "done");
         raw.batch(CopierVerb::takeOut, {0}, {p.exported});
       }},
      {"in, named as if out",
       [&](Raw& raw, Piece& p) {
         raw.send(verb(CopierVerb::beginBringIn));
         CHECK(raw.hear() == "done");
         raw.send(verb(CopierVerb::bringIn, 1), std::vector<std::byte>(4), std::vector<int>{p.exported});
       }},
      {"empty batch", [&](Raw& raw, Piece&) { raw.batch(CopierVerb::takeOut, {}, {}); }},
  };
  TestCopier copier(8 * kMiB);
  Piece piece;
  for (const bool reserved : {false, true}) {
    for (const auto& [name, breach] : reserved ? afterReserve : breaches) {
      INFO(name);
      Raw raw(copier.connect());
      if (reserved) REQUIRE(raw.reserveOne());
      breach(raw, piece);
      CHECK(raw.hear() == "cut");
      CHECK(eventually([&] { return copier.idle(); }));
    }
  }
}

TEST_CASE("a descriptor that is no memory of its size is refused, and may be sent again") {
  TestCopier copier(8 * kMiB);
  Piece piece;
  piece.memory.fill(1);
  Memory larger({{0, 2 * kUnit}});
  larger.createAll();
  const Descriptor exportedLarger(larger.exportPiece(0)), null(open("/dev/null", O_RDWR | O_CLOEXEC));
  const Descriptor loose(memfd_create("loose", MFD_CLOEXEC));
  REQUIRE(ftruncate(loose, kUnit) == 0);
  Raw raw(copier.connect());
  REQUIRE(raw.reserveOne());
  for (const int wrong : {int{null}, int{loose}, int{exportedLarger}, raw.socket()}) {
    CHECK(raw.batch(CopierVerb::takeOut, {0}, {wrong}));
    const std::string said = raw.hear();
    INFO(said);
    CHECK((said != "cut" && said != "done" && !said.empty()));
  }
  for (const int wrong : {int{null}, int{loose}, int{exportedLarger}, raw.socket()}) {
    CHECK(raw.across({{0, 1, 1}}, {piece.exported, wrong}));
    const std::string said = raw.hear();
    INFO(said);
    CHECK((said != "cut" && said != "done" && !said.empty()));
  }
  CHECK(raw.batch(CopierVerb::takeOut, {0}, {piece.exported}));
  CHECK(raw.hear() == "done");
}

TEST_CASE("more batches than two wait, and all are answered") {
  TestCopier copier(64 * kMiB);
  Memory memory(std::vector<CopierPiece>(10, {0, kUnit}));
  memory.createAll();
  Raw raw(copier.connect());
  REQUIRE(raw.plan(std::vector<CopierPlanned>(10, {0, 1})));
  REQUIRE(raw.send(Raw::of(CopierVerb::reserve, 10)));
  REQUIRE(raw.hear() == "done");
  for (uint32_t i = 0; i < 10; ++i) {
    const Descriptor exported(memory.exportPiece(i));
    REQUIRE(raw.batch(CopierVerb::takeOut, {i}, {exported}));
  }
  for (uint32_t i = 0; i < 10; ++i) CHECK(raw.hear() == "done");
}

TEST_CASE("ten thousand messages of chance, beside a session that is served") {
  TestCopier copier(64 * kMiB);
  Memory memory(manyPieces(6));
  memory.createAll();
  memory.fill(9);
  auto link = linkTo(copier.connect());
  REQUIRE(link.reserve(memory.pieces()).empty());
  REQUIRE(link.takeOut(exporting(memory), releasing(memory)).empty());
  Piece piece;
  const Descriptor null(open("/dev/null", O_RDWR | O_CLOEXEC));
  std::mt19937 chance(20251);
  const auto below = [&](uint32_t bound) { return static_cast<uint32_t>(chance() % bound); };
  std::optional<Raw> raw;
  for (int i = 0; i < 10'000; ++i) {
    if (!raw) {
      raw.emplace(copier.connect());
      if (below(4) != 0) raw->plan({{below(2), 1 + below(2)}, {below(3), 1}});
      if (below(4) != 0) raw->send(Raw::of(CopierVerb::reserve, 2));
    }
    std::vector<uint32_t> words(below(6));
    for (uint32_t& word : words) word = below(8) != 0 ? below(3) : static_cast<uint32_t>(chance());
    std::vector<int> with;
    for (uint32_t left = below(3); left > 0; --left)
      with.push_back(below(3) != 0 ? int{piece.exported} : int{null});
    CopierMessage message = Raw::of(CopierVerb{below(9)}, below(4) != 0 ? with.size() : below(5));
    if (below(50) == 0) message.magic = static_cast<uint32_t>(chance());
    auto behind = std::as_bytes(std::span<const uint32_t>(words));
    if (below(3) != 0) behind = behind.first(std::min(behind.size(), message.count * sizeof(uint32_t)));
    if (!raw->send(message, behind, with) || below(60) == 0) raw.reset();
  }
  raw.reset();
  CHECK(eventually([&] { return copier.open() == 1; }));
  memory.createAll();
  CHECK(link.bringIn(exporting(memory)).empty());
  CHECK(memory.wrong(9) == 0);
  uint64_t kept = 0;
  for (const auto& one : memory.pieces()) kept += one.bytes;
  CHECK(copier.store().usage().memory == kept);
}
