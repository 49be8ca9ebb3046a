// The published vectors: FIPS 180-4 (NIST's SHA-256 examples) and RFC 4231.
#include "base/hmac.h"

#include <string>

#include "catch.h"
#include "schema/handshake.h"

using namespace gpupool;

namespace {

std::span<const std::byte> view(const std::string& text) { return std::as_bytes(std::span(text)); }

std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (std::byte b : bytes) {
    text += "0123456789abcdef"[static_cast<unsigned>(b) >> 4];
    text += "0123456789abcdef"[static_cast<unsigned>(b) & 15];
  }
  return text;
}

std::string mac(const std::string& key, const std::string& message) {
  return hex(hmacSha256(view(key), view(message)));
}

}  // namespace

TEST_CASE("SHA-256 gives FIPS 180-4's examples") {
  CHECK(hex(sha256({})) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(hex(sha256(view("abc"))) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hex(sha256(view("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))) ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(hex(sha256(view(std::string(1'000'000, 'a')))) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("SHA-256 does not depend on how the input is cut") {
  std::string text;
  for (int i = 0; i < 200; ++i) text += static_cast<char>(i);
  for (size_t length : {55, 56, 63, 64, 65, 119, 120, 128, 200}) {
    const auto whole = view(text).first(length);
    for (size_t cut = 0; cut <= length; ++cut) {
      Sha256 hash;
      hash.update(whole.first(cut));
      hash.update(whole.subspan(cut));
      REQUIRE(hash.finish() == sha256(whole));
    }
  }
}

TEST_CASE("HMAC-SHA256 gives RFC 4231's vectors") {
  CHECK(mac(std::string(20, '\x0b'), "Hi There") ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(mac("Jefe", "what do ya want for nothing?") ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(mac(std::string(20, '\xaa'), std::string(50, '\xdd')) ==
        "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string counting;
  for (char c = 1; c <= 25; ++c) counting += c;
  CHECK(mac(counting, std::string(50, '\xcd')) ==
        "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK(mac(std::string(20, '\x0c'), "Test With Truncation").substr(0, 32) ==
        "a3b6167473100ee06e0c796c2955552b");
  CHECK(mac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First") ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK(mac(std::string(131, '\xaa'),
            "This is a test using a larger than block-size key and a larger than block-size data. The key "
            "needs to be "
            "hashed before being used by the HMAC algorithm.") ==
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST_CASE("a proof changes with every fact it is bound to") {
  const std::string key(32, 'k'), a(32, 'a'), b(32, 'b');
  schema::HandshakeFacts facts{{1, 2}, 3, view(a), view(b), "node"};
  const Digest proof = schema::handshakeProof(view(key), schema::kRoleHolder, facts);
  CHECK(equalConstantTime(proof, schema::handshakeProof(view(key), schema::kRoleHolder, facts)));
  const auto differs = [&](schema::HandshakeFacts other, std::string_view role = schema::kRoleHolder) {
    return !equalConstantTime(proof, schema::handshakeProof(view(key), role, other));
  };
  CHECK(differs(facts, schema::kRoleServer));
  CHECK(differs({{9, 2}, 3, view(a), view(b), "node"}));
  CHECK(differs({{1, 9}, 3, view(a), view(b), "node"}));
  CHECK(differs({{1, 2}, 9, view(a), view(b), "node"}));
  CHECK(differs({{1, 2}, 3, view(b), view(b), "node"}));
  CHECK(differs({{1, 2}, 3, view(a), view(a), "node"}));
  CHECK(differs({{1, 2}, 3, view(a), view(b), "nodf"}));
  CHECK_FALSE(equalConstantTime(proof, std::span<const std::byte>(proof).first(31)));
}
