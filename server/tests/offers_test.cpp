// What sessions of a lease, and of a tenant's leases, share, in the server's books.
#include "server/front/offers.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "schema/worker.capnp.h"
#include "server/front/memory_account.h"

#include "catch.h"

using namespace gpupool;
using namespace gpupool::server;
using Refusal = Offers::Refusal;

namespace {

const Offers::AccountName kLease{{1, 1}, 7}, kOther{{1, 2}, 7}, kMoved{{1, 1}, 8};
constexpr uint64_t kOwner = 1, kGuest = 2, kThird = 3;
const std::vector<std::string> kDevices{"gpu 0", "gpu 1"};
const Offers::MayShare kNobody = [](const Id&, const Id&) { return false; };
const Offers::MayShare kTenant = [](const Id&, const Id&) { return true; };

kj::AutoCloseFd someDescriptor() { return kj::AutoCloseFd(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

Offers::Token offer(Offers& offers, uint64_t piece = 1, uint64_t offset = 0) {
  Offers::Token token;
  REQUIRE(offers.offer({kLease, kOwner, kDevices}, {piece, 0, 64, offset, 8}, someDescriptor(), token) ==
          Refusal::none);
  return token;
}

uint64_t openIt(Offers& offers, const Offers::Token& token, uint64_t session = kGuest) {
  Offers::Opened opened;
  REQUIRE(offers.open({kLease, session, kDevices}, token, kNobody, opened) == Refusal::none);
  return opened.opening;
}

Refusal refusal(Offers& offers, const Offers::Token& token, const Offers::AccountName& account = kLease,
                uint64_t session = kGuest) {
  Offers::Opened opened;
  return offers.open({account, session, kDevices}, token, kNobody, opened);
}

bool isOpen(int descriptor) { return fcntl(descriptor, F_GETFD) >= 0; }

}  // namespace

TEST_CASE("what is offered can be opened by other sessions of the lease, and by nobody else") {
  Offers offers(10);
  const auto token = offer(offers, 1, 24);
  Offers::Opened opened;
  REQUIRE(offers.open({kLease, kGuest, kDevices}, token, kNobody, opened) == Refusal::none);
  CHECK(opened.part.bytes == 64);
  CHECK(opened.part.offset == 24);
  CHECK(opened.part.length == 8);
  CHECK(isOpen(opened.descriptor));
  CHECK(refusal(offers, token, kOther) == Refusal::elsewhere);
  CHECK(refusal(offers, token, kMoved) == Refusal::elsewhere);
  CHECK(refusal(offers, token, kLease, kOwner) == Refusal::own);
  CHECK(refusal(offers, {offers.server(), Id::random()}) == Refusal::unknown);
  CHECK(refusal(offers, {Id::random(), token.key}) == Refusal::elsewhere);
  Offers earlier(10);
  CHECK(refusal(earlier, token) == Refusal::elsewhere);
}

TEST_CASE("an offer ends by its session's word, or with its piece") {
  Offers offers(10);
  const auto first = offer(offers), second = offer(offers, 1, 8), other = offer(offers, 2);
  CHECK(offers.pieces() == 2);
  offers.endOffer(kGuest, first);  // not his
  CHECK(refusal(offers, first) == Refusal::none);
  offers.endOffer(kOwner, first);
  CHECK(refusal(offers, first) == Refusal::unknown);
  offers.endOffer(kOwner, first);
  CHECK(refusal(offers, second) == Refusal::none);
  REQUIRE(offers.endPiece(kOwner, 1));
  CHECK_FALSE(offers.endPiece(kOwner, 1));
  CHECK_FALSE(offers.endPiece(kGuest, 2));
  CHECK(refusal(offers, second) == Refusal::unknown);
  CHECK(refusal(offers, other) == Refusal::none);
  offers.leave(kOwner);
  CHECK(refusal(offers, other) == Refusal::unknown);
}

TEST_CASE("a piece that ends is charged to its heir until the last one has closed it") {
  Offers offers(10);
  MemoryAccount account({100});
  REQUIRE(account.take(kOwner, 0, 64));
  const auto apply = [&](const std::optional<Offers::Charge>& charge) {
    if (!charge) return;
    if (charge->to != 0)
      account.hand(charge->from, charge->to, charge->place, charge->bytes);
    else
      account.give(charge->from, charge->place, charge->bytes);
  };
  const auto token = offer(offers);
  const uint64_t mine = openIt(offers, token), again = openIt(offers, token);
  const uint64_t his = openIt(offers, token, kThird);
  CHECK(account.used(0) == 64);  // once
  apply(offers.endPiece(kOwner, 1));
  CHECK(account.used(kOwner, 0) == 0);
  CHECK(account.used(0) == 64);
  account.forget(kOwner);
  CHECK(account.used(0) == 64);
  CHECK_FALSE(offers.close(kThird, mine));  // not his
  apply(offers.close(kGuest, mine));
  apply(offers.close(kGuest, mine));
  apply(offers.close(kGuest, again));
  CHECK(account.used(0) == 64);
  apply(offers.close(kThird, his));
  CHECK(account.used(0) == 0);
  CHECK(offers.pieces() == 0);
}

TEST_CASE("a session that ends leaves nothing but what others have opened") {
  Offers offers(10);
  const auto kept = offer(offers, 1), dropped = offer(offers, 2);
  Offers::Opened opened, unused;
  REQUIRE(offers.open({kLease, kGuest, kDevices}, kept, kNobody, opened) == Refusal::none);
  REQUIRE(offers.open({kLease, kThird, kDevices}, dropped, kNobody, unused) == Refusal::none);
  CHECK(offers.leave(kThird).empty());  // its owner has it still
  const auto charges = offers.leave(kOwner);
  REQUIRE(charges.size() == 2);
  CHECK(charges[0].to == (Offers::kHeir | 1));
  CHECK(charges[1].to == 0);
  CHECK_FALSE(isOpen(opened.descriptor));  // nobody opens it any more
  CHECK(refusal(offers, kept) == Refusal::unknown);
  CHECK(offers.pieces() == 1);
  const auto last = offers.leave(kGuest);
  REQUIRE(last.size() == 1);
  CHECK(last[0].from == (Offers::kHeir | 1));
  CHECK(last[0].to == 0);
  CHECK(offers.pieces() == 0);
}

TEST_CASE("pieces are counted, and no descriptor is kept twice") {
  Offers offers(2);
  offer(offers, 1);
  const int before = dup(0);
  close(before);
  offer(offers, 1, 8);
  const int after = dup(0);
  close(after);
  CHECK(before == after);
  offer(offers, 2);
  Offers::Token token;
  CHECK(offers.offer({kLease, kGuest, kDevices}, {1, 0, 64, 0, 8}, someDescriptor(), token) ==
        Refusal::tooMany);
  CHECK(offers.offer({kLease, kOwner, kDevices}, {3, 0, 64, 0, 8}, kj::AutoCloseFd(), token) ==
        Refusal::tooMany);
  offers.endPiece(kOwner, 1);
  CHECK(offers.offer({kLease, kGuest, kDevices}, {1, 0, 64, 0, 8}, someDescriptor(), token) == Refusal::none);
}

TEST_CASE("who has something in common is known, by place") {
  Offers offers(10);
  const auto token = offer(offers);
  CHECK(offers.sharers(kOwner, 0).empty());
  openIt(offers, token);
  openIt(offers, token, kThird);
  CHECK(offers.sharers(kOwner, 0) == std::set<uint64_t>{kGuest, kThird});
  CHECK(offers.sharers(kGuest, 0) == std::set<uint64_t>{kOwner, kThird});
  CHECK(offers.sharers(kOwner, 1).empty());
  offers.leave(kOwner);
  CHECK(offers.sharers(kGuest, 0) == std::set<uint64_t>{kThird});
}

TEST_CASE("a session of another lease opens what may be shared, on a device that its lease has") {
  Offers offers(10);
  const auto token = offer(offers);
  Offers::Opened opened;
  const auto asks = [&](std::vector<std::string> devices, const Offers::AccountName& account = kOther) {
    return offers.open({account, kGuest, std::move(devices)}, token, kTenant, opened);
  };
  CHECK(refusal(offers, token, kOther) == Refusal::elsewhere);
  CHECK(asks({"gpu 1"}) == Refusal::otherDevice);
  CHECK(asks({"gpu 0"}, kMoved) == Refusal::elsewhere);  // one lease's two placements
  CHECK(offers.lenders().empty());
  REQUIRE(asks({"gpu 2", "gpu 0"}) == Refusal::none);
  CHECK(opened.part.place == 1);  // as the other lease counts
  CHECK(opened.part.bytes == 64);
  CHECK(offers.lenders() == std::set<Id>{kLease.first});
  CHECK(offers.borrowers(kLease.first) == std::set<uint64_t>{kGuest});
  CHECK(offers.borrowers(kLease.first, kLease.second) == std::set<uint64_t>{kGuest});
  CHECK(offers.borrowers(kLease.first, kMoved.second).empty());
  CHECK(offers.borrowers(kOther.first).empty());
  openIt(offers, token, kThird);  // of the lease itself
  CHECK(offers.borrowers(kLease.first) == std::set<uint64_t>{kGuest});
}

TEST_CASE("what another lease has opened outlives its owner, and nobody opens it again") {
  Offers offers(10);
  const auto token = offer(offers);
  Offers::Opened opened;
  REQUIRE(offers.open({kOther, kGuest, kDevices}, token, kTenant, opened) == Refusal::none);
  const auto charges = offers.leave(kOwner);
  REQUIRE(charges.size() == 1);
  CHECK(charges[0].account == kLease);  // charged to the lease of which it is
  CHECK(charges[0].to == (Offers::kHeir | 1));
  CHECK(offers.lenders() == std::set<Id>{kLease.first});
  Offers::Opened again;
  CHECK(offers.open({kOther, kThird, kDevices}, token, kTenant, again) == Refusal::unknown);
  const auto last = offers.leave(kGuest);
  REQUIRE(last.size() == 1);
  CHECK(last[0].account == kLease);
  CHECK(offers.lenders().empty());
}

TEST_CASE("events are on no device, and their lease's devices do not wait for them") {
  Offers offers(10);
  Offers::Token token;
  REQUIRE(offers.offer({kLease, kOwner, kDevices}, {1, schema::HOST_MEMORY, 64, 0, 8}, someDescriptor(),
                       token) == Refusal::none);
  Offers::Opened opened;
  REQUIRE(offers.open({kOther, kGuest, {"gpu 7"}}, token, kTenant, opened) == Refusal::none);
  CHECK(opened.part.place == schema::HOST_MEMORY);
  CHECK(offers.lenders().empty());
  CHECK(offers.sharers(kOwner, schema::HOST_MEMORY) == std::set<uint64_t>{kGuest});
  // Closed by one whose streams may still have to record the event: the others hear of its death.
  REQUIRE_FALSE(offers.close(kGuest, opened.opening));
  CHECK(offers.sharers(kOwner, schema::HOST_MEMORY).empty());
  CHECK(offers.sharers(kGuest, schema::HOST_MEMORY) == std::set<uint64_t>{kOwner});
  offers.leave(kGuest);
  CHECK(offers.sharers(kGuest, schema::HOST_MEMORY).empty());
}

TEST_CASE("nothing is offered on a device that the lease does not have") {
  Offers offers(10);
  Offers::Token token;
  CHECK(offers.offer({kLease, kOwner, kDevices}, {1, 2, 64, 0, 8}, someDescriptor(), token) ==
        Refusal::unknown);
  CHECK(offers.pieces() == 0);
}

namespace {

constexpr uint64_t kLife = uint64_t{1} << 32;
const SharedPiece kPiece{kLife | 1, kLease, kOwner, 1, 0, 64, "gpu 0"};
const Offers::IsHere kAllHere = [](const Offers::AccountName&) { return true; };

Offers::Earlier earlier(const Offers::AccountName& account, uint64_t session) {
  return {account, session, {}, {}, {}};
}
void add(Offers::Earlier& to, const SharedPiece& piece, kj::AutoCloseFd descriptor = someDescriptor()) {
  to.pieces.try_emplace(piece.id, piece, kj::mv(descriptor));
}

std::vector<Offers::Charge> restore(Offers& offers, Offers::Earlier one, Offers::Earlier other,
                                    const Offers::IsHere& isHere = kAllHere) {
  std::vector<Offers::Earlier> all;
  all.push_back(std::move(one));
  all.push_back(std::move(other));
  return offers.restore(std::move(all), isHere);
}

}  // namespace

TEST_CASE("what was shared in an earlier life is shared again, whoever says so first") {
  Offers before(10, {9, 9}, 1);
  const auto token = offer(before, 1, 24);
  CHECK(before.pieceOf(token) == kPiece);
  const uint64_t opening = openIt(before, token);

  Offers offers(10, {9, 9}, 2);
  auto guest = earlier(kLease, kGuest), owner = earlier(kLease, kOwner);
  guest.openings.emplace(opening, kPiece);
  add(owner, kPiece);
  owner.offers.push_back({token.key, 1, 24, 8});
  CHECK(restore(offers, std::move(guest), std::move(owner)).empty());  // its owner has it on its account
  Offers::Opened opened;
  REQUIRE(offers.open({kLease, kThird, kDevices}, token, kNobody, opened) == Refusal::none);
  CHECK(opened.opening > opening);
  CHECK(opened.part.offset == 24);
  CHECK(opened.part.length == 8);
  CHECK(isOpen(opened.descriptor));
  CHECK(offers.pieceOf(token) == kPiece);
  CHECK(offers.sharers(kGuest, 0) == std::set<uint64_t>{kOwner, kThird});
  CHECK(offers.leave(kOwner).at(0).to == (Offers::kHeir | kPiece.id));
  CHECK_FALSE(offers.close(kGuest, opening));
  CHECK(offers.leave(kThird).at(0).to == 0);
  CHECK(offers.pieces() == 0);
}

TEST_CASE("what the dead have left in an earlier life is charged to their lease until it is closed") {
  Offers offers(10, {9, 9}, 2);
  auto guest = earlier(kOther, kGuest), third = earlier(kLease, kThird);
  guest.openings = {{5, kPiece}, {6, kPiece}};
  third.openings = {{5, kPiece}};
  const auto charges = restore(offers, std::move(guest), std::move(third));
  REQUIRE(charges.size() == 1);
  CHECK(charges[0].account == kLease);
  CHECK(charges[0].from == 0);
  CHECK(charges[0].to == (Offers::kHeir | kPiece.id));
  CHECK(charges[0].bytes == 64);
  CHECK(offers.lenders() == std::set<Id>{kLease.first});
  CHECK_FALSE(offers.close(kGuest, 5));
  CHECK_FALSE(offers.close(kGuest, 6));
  CHECK(offers.lenders().empty());
  const auto last = offers.close(kThird, 5);
  REQUIRE(last);
  CHECK(last->from == charges[0].to);
  CHECK(last->to == 0);
  CHECK(offers.pieces() == 0);
}

TEST_CASE("what was of a lease that is none here is nobody's, and another piece of its owner is another") {
  Offers offers(10, {9, 9}, 2);
  SharedPiece later = kPiece;  // of the same number, by the owner's next worker
  later.id = kPiece.id + 1;
  auto guest = earlier(kOther, kGuest), owner = earlier(kLease, kOwner);
  guest.openings = {{5, kPiece}};
  add(owner, later);
  const auto isHere = [](const Offers::AccountName&) { return false; };
  CHECK(restore(offers, std::move(guest), std::move(owner), isHere).empty());
  CHECK(offers.pieces() == 1);
  CHECK(offers.lenders().empty());
  CHECK(offers.sharers(kOwner, 0).empty());
}

TEST_CASE("nobody gets another's piece by saying that it was his, and nothing is restored twice") {
  Offers offers(2, {9, 9}, 2);
  auto liar = earlier(kOther, kGuest), owner = earlier(kLease, kOwner);
  add(liar, kPiece);
  liar.offers.push_back({{7, 7}, 1, 0, 8});
  add(owner, kPiece, kj::AutoCloseFd(open("/dev/zero", O_RDONLY | O_CLOEXEC)));
  for (int i = 0; i < 2; ++i) owner.offers.push_back({{7, 8}, 1, 0, 8});
  owner.offers.push_back({{7, 9}, 2, 0, 8});  // of no piece
  owner.openings.emplace(1, kPiece);          // its own
  for (uint64_t piece = 2; piece < 5; ++piece) {
    SharedPiece more = kPiece;
    more.id = kLife | piece;
    more.piece = piece + 10;
    add(owner, more);
  }
  CHECK(restore(offers, std::move(liar), std::move(owner)).empty());
  CHECK(offers.pieces() == 2);
  Offers::Opened opened;
  const auto opens = [&](const Id& key) {
    return offers.open({kLease, kThird, kDevices}, {offers.server(), key}, kNobody, opened);
  };
  CHECK(opens({7, 7}) == Refusal::unknown);
  CHECK(opens({7, 9}) == Refusal::unknown);
  REQUIRE(opens({7, 8}) == Refusal::none);
  struct stat its{}, owners{};
  REQUIRE(fstat(opened.descriptor, &its) == 0);
  REQUIRE(stat("/dev/zero", &owners) == 0);
  CHECK(its.st_rdev == owners.st_rdev);
}

TEST_CASE("numbers that a session says again are of earlier lives, and leave those of this one alone") {
  Offers offers(10, {9, 9}, 2);
  auto guest = earlier(kOther, kGuest), third = earlier(kOther, kThird);
  SharedPiece coming = kPiece;
  coming.id = (kLife << 1) | 1;
  guest.openings = {{0, kPiece}, {kLife << 1 | 1, kPiece}, {~uint64_t{0}, kPiece}, {7, coming}};
  CHECK(restore(offers, std::move(guest), std::move(third)).empty());
  CHECK(offers.pieces() == 0);
  const auto token = offer(offers);
  CHECK(openIt(offers, token) == (kLife << 1 | 1));
  CHECK(openIt(offers, token) == (kLife << 1 | 2));
}

TEST_CASE("a receipt says what its server has written, and nothing else") {
  const ShareReceipts receipts(std::vector(32, std::byte{'k'})), others(std::vector(32, std::byte{'o'}));
  auto receipt = receipts.write(kPiece);
  CHECK(receipts.read(receipt) == kPiece);
  CHECK_FALSE(others.read(receipt));
  for (size_t at = 0; at < receipt.size(); ++at) {
    receipt[at] ^= std::byte{1};
    CHECK_FALSE(receipts.read(receipt));
    receipt[at] ^= std::byte{1};
  }
  for (size_t bytes = 0; bytes < receipt.size(); ++bytes)
    CHECK_FALSE(receipts.read(std::span(receipt).first(bytes)));
}
