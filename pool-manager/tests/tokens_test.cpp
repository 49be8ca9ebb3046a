// The tokens that a manager makes: what is kept of them, who they make of a connection, and their end.
#include "pool-manager/tokens.h"

#include "catch.h"
#include "pool-manager/login.h"
#include "pool_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

// A book above a pool's store, as the service has it.
struct Fixture {
  Fixture() { restart(); }
  void restart() {
    book.reset(), pool.reset();
    pool = std::make_unique<Pool>(*store, events, PoolTimes{}, PoolStart{"boot", 0, 1, Id::random().text()});
    book = std::make_unique<TokenBook>(
        [this](auto writes, auto entries, auto done) { pool->write(writes, entries, done); },
        [this] { return nowS; });
    book->load(store->range(kTokenPrefix));
  }
  void deliver() {
    while (store->deliver()) {
    }
  }
  MadeToken make(const std::string& tenant, Role role = Role::user, const std::string& name = "",
                 uint64_t expiresInS = 0) {
    MadeToken made;
    std::string why = "not told";
    book->create({tenant, name, role, expiresInS, "eve@head"}, "the operator",
                 [&](const MadeToken& token, const std::string& text) { made = token, why = text; });
    deliver();
    REQUIRE(why == "");
    return made;
  }
  // What a login with this token is told; "": it is let in.
  std::string login(const std::string& tenant, const std::string& token, Principal* who = nullptr) {
    const std::vector<std::byte> nonce(schema::kNonceBytes);
    Login login(*book, failures, "peer", nullptr);
    const auto challenge = login.begin(tenant, nonce, tokenId(token));
    const schema::LoginFacts facts{tenant, nonce, challenge};
    std::string refused;
    KJ_IF_MAYBE (error, kj::runCatchingExceptions([&]() {
                   const Digest answer = login.prove(schema::clientProof(token, facts));
                   CHECK(equalConstantTime(answer, schema::managerProof(schema::verifierOf(token), facts)));
                 }))
      refused = schema::faultOf(*error).text;
    if (who != nullptr && login.proven()) *who = login.who();
    return refused;
  }
  void revoke(const std::string& id) {
    std::string why = "not told";
    book->revoke(id, "the operator", [&](const std::string& text) { why = text; });
    deliver();
    CHECK(why == "");
  }

  std::unique_ptr<Store> store = makeMemoryStore();
  Recorder events;
  FailureLimit failures{100, std::chrono::hours(1)};
  uint64_t nowS = 1'000'000;
  std::unique_ptr<Pool> pool;
  std::unique_ptr<TokenBook> book;
};

}  // namespace

TEST_CASE("a token's text has an id and a secret, and no other has either") {
  const NewToken one = makeToken(), other = makeToken();
  CHECK(one.text.size() == 4 + 16 + 1 + 64);
  CHECK(tokenId(one.text) == one.id);
  CHECK(one.id != other.id);
  CHECK(one.text.substr(21) != other.text.substr(21));
  for (const std::string& text : {std::string(), std::string(32, 'a'), one.text.substr(1), one.text + "0"})
    CHECK(tokenId(text).empty());
}

TEST_CASE_METHOD(Fixture, "what the store has is enough to check a login, and not to log in") {
  const MadeToken made = make("alice", Role::user, "laptop");
  for (const Entry& entry : store->range("")) {
    CHECK_FALSE(contains(entry.value, made.text));
    CHECK_FALSE(contains(entry.value, made.text.substr(21)));
  }
  restart();
  Principal who;
  CHECK(login("alice", made.text, &who) == "");
  CHECK(who.role == Role::user);
  CHECK(who.tenant == "alice");
  CHECK(who.token == made.token.id);
  // Who has read the store knows both halves of the verifier, and signs with them what he likes.
  const StoredToken& stored = *book->find(made.token.id);
  const std::vector<std::byte> nonce(schema::kNonceBytes);
  for (const Digest& key : {stored.verifier.stored, stored.verifier.manager}) {
    Login thief(*book, failures, "thief", nullptr);
    const auto challenge = thief.begin("alice", nonce, made.token.id);
    const schema::LoginFacts facts{"alice", nonce, challenge};
    const Digest forged = schema::masked(key, schema::signFacts(stored.verifier.stored, facts));
    CHECK(kj::runCatchingExceptions([&]() { thief.prove(forged); }) != nullptr);
    CHECK_FALSE(thief.proven());
  }
}

TEST_CASE_METHOD(Fixture, "a token is its tenant's, whatever the caller says") {
  const MadeToken made = make("alice");
  make("bob");
  CHECK(contains(login("bob", made.text), "this token is tenant 'alice's, and not 'bob's"));
  std::string forged = made.text;
  forged.back() = forged.back() == '0' ? '1' : '0';
  CHECK(contains(login("alice", forged), "refuses the token of tenant 'alice'"));
  CHECK(book->bearersOf(forged).empty());
  REQUIRE(book->bearersOf(made.text).size() == 1);
  CHECK(book->bearersOf(made.text)[0].tenant == "alice");
  CHECK(book->find(made.token.id)->usedS == 0);
  CHECK(login("alice", made.text) == "");
  CHECK(book->find(made.token.id)->usedS == nowS);
}

TEST_CASE_METHOD(Fixture, "tokens expire, and are revoked") {
  const MadeToken week = make("alice", Role::user, "week", uint64_t{7} * 86'400),
                  ever = make("alice", Role::user, "ever");
  CHECK(login("alice", week.text) == "");
  Principal who;
  login("alice", week.text, &who);
  nowS += 7 * 86'400 - 1;
  CHECK(book->tick().empty());
  CHECK(book->endOf(who) == "");
  nowS += 1;
  CHECK(book->tick() == std::vector<std::string>{week.token.id});
  nowS += 1;
  CHECK(book->tick().empty());
  CHECK(contains(book->endOf(who), "expired on 1970-01-19"));
  CHECK(contains(login("alice", week.text), "(week) expired on"));
  make("alice", Role::user, "week");  // the name is free again

  login("alice", ever.text, &who);
  revoke(ever.token.id);
  CHECK(contains(book->endOf(who), "(ever) was revoked on"));
  revoke(ever.token.id);  // may be repeated
  restart();
  CHECK(contains(login("alice", ever.text), "(ever) was revoked on"));
  CHECK(thrown([&] { book->revoke("0123456789abcdef", "x", [](const std::string&) {}); }) ==
        "there is no token 0123456789abcdef");

  // What ended long ago is forgotten; but the last one keeps the pool closed.
  nowS += kForgetTokenS + 10;
  book->tick();
  deliver();
  CHECK(book->list().size() == 1);
  revoke(book->list()[0].id);
  nowS += kForgetTokenS + 10;
  book->tick();
  CHECK(book->demanded());
}

TEST_CASE_METHOD(Fixture, "what can be no token") {
  CHECK_FALSE(book->demanded());
  const auto complaint = [&](const TokenWish& wish) {
    return thrown([&] { book->create(wish, "x", [](const MadeToken&, const std::string&) {}); });
  };
  CHECK(contains(complaint({"", "n"}), "a tenant's name"));
  CHECK(contains(complaint({"a b", "n"}), "a tenant's name"));
  CHECK(contains(complaint({"*", "n"}), "a tenant's name"));
  CHECK(contains(complaint({"Z\u00fcrich", "n"}), "a tenant's name has 1 to 64 ASCII characters"));
  CHECK(contains(complaint({"a:b", "n"}), "a tenant's name"));
  CHECK(contains(complaint({"servers", "n"}), "the role 'server'"));
  CHECK(contains(complaint({"alice", "n", Role::server}), "the role 'server'"));
  CHECK(contains(complaint({"alice", "a\nb"}), "printable"));
  CHECK(contains(complaint({"alice", "n", Role::user, kMostExpiryS + 1}), "within ten years"));
  make("alice", Role::user, "laptop");
  CHECK(contains(complaint({"alice", "laptop"}), "has a token named 'laptop' already"));
  make("bob", Role::user, "laptop");
  CHECK(book->demanded());
}

TEST_CASE_METHOD(Fixture,
                 "making and revoking tokens is in the audit log, which tells others nothing of it") {
  const MadeToken made = make("alice", Role::viewer, "laptop");
  revoke(made.token.id);
  const auto told = [&](const Principal& who) {
    std::string text;
    for (const AuditEntry& one : pool->audit(who, {}, 100))
      text += std::string(name(one.event)) + " " + one.tenant + " " + one.holder + " " + one.by + "\n";
    return text;
  };
  const std::string label = "token " + made.token.id + " (laptop), viewer";
  const std::string all =
      "token-created alice " + label + " the operator\ntoken-revoked alice " + label + " the operator\n";
  CHECK(told(kAdmin) == all);
  CHECK(told({Role::user, "alice"}) == all);
  CHECK(told({Role::user, "bob"}) == "");
}

TEST_CASE("the table of roles") {
  // viewer, user, scheduler, server, operator: those who may.
  const std::vector<std::pair<Operation, std::string>> table = {
      {Operation::look, "vucso"}, {Operation::seeQuotas, "vuco"},  {Operation::seeTenants, "vuco"},
      {Operation::lease, "uco"},  {Operation::changeLease, "uco"}, {Operation::serve, "so"},
      {Operation::dropLost, "o"}, {Operation::cordon, "o"},        {Operation::setQuota, "o"},
      {Operation::tokens, "o"}};
  CHECK(table.size() == kOperations);
  const std::vector<std::pair<char, Role>> roles = {{'v', Role::viewer},
                                                    {'u', Role::user},
                                                    {'c', Role::scheduler},
                                                    {'s', Role::server},
                                                    {'o', Role::admin}};
  for (const auto& [operation, allowed] : table)
    for (const auto& [letter, role] : roles) {
      const Principal who{role, "t"};
      CHECK(may(who, operation) == (allowed.find(letter) != std::string::npos));
      CHECK(refusalOf(who, operation).empty() == may(who, operation));
      CHECK(roleOf(name(role)) == role);
    }
  CHECK(Principal{Role::scheduler, "slurm"}.owns("alice"));
  CHECK_FALSE(Principal{Role::viewer, "bob"}.owns("alice"));
}
