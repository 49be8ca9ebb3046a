#include "client/selftest.h"

#include <cstdio>
#include <string>
#include <vector>

#include "catch.h"

using namespace gpupool::client::selftest;

namespace {

std::span<const uint8_t> bytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

std::string hex(const Hash& hash) {
  std::string text;
  for (uint8_t byte : hash) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    text += digits;
  }
  return text;
}

}  // namespace

TEST_CASE("selftest: MD2's test suite, RFC 1319 A.5") {
  CHECK(hex(md2(bytes(""))) == "8350e5a3e24c153df2275c9f80692773");
  CHECK(hex(md2(bytes("a"))) == "32ec01ec4a6dac72c0ab96fb34c0b5d1");
  CHECK(hex(md2(bytes("abc"))) == "da853b0d3f88d99b30283a69e6ded6bb");
  CHECK(hex(md2(bytes("message digest"))) == "ab4f496bfb2a530b219ff33031fe06b0");
  CHECK(hex(md2(bytes("abcdefghijklmnopqrstuvwxyz"))) == "4e8ddff3650292ab5a4108c3aa47940b");
  CHECK(hex(md2(bytes("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"))) ==
        "da33def2a42df13975352846c30338cd");
  CHECK(hex(md2(bytes("12345678901234567890123456789012345678901234567890123456789012345678901234567890"))) ==
        "d5976f79d83d3a0dc9806c3c66f3efd8");
}

TEST_CASE("selftest: HMAC is the hash of the hash, RFC 2104") {
  std::array<uint8_t, 16> key;
  for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<uint8_t>(17 * i);
  std::string inner, outer;
  for (uint8_t byte : key) {
    inner += static_cast<char>(byte ^ 0x36);
    outer += static_cast<char>(byte ^ 0x5c);
  }
  const std::string message = "what do ya want for nothing?";
  const Hash first = md2(bytes(inner + message));
  const Hash expected = md2(bytes(outer + std::string(first.begin(), first.end())));
  CHECK(hmacMd2(key, bytes(message)) == expected);
}

TEST_CASE("selftest: every field of the question counts") {
  const Question question{13000, 13002, 100, 200, 0x1000, 0x2000, 0x3000, 1'700'000'000};
  std::vector<DeviceIdentity> devices(2);
  devices[1].pciBus = 7;
  const Hash base = answer(question, devices);
  CHECK(base == answer(question, devices));
  Question other = question;
  other.processId = 101;
  CHECK(answer(other, devices) != base);
  other = question;
  other.thread = 1;
  CHECK(answer(other, devices) != base);
  other = question;
  other.seconds += 1;
  CHECK(answer(other, devices) != base);
  other = question;
  other.integrityFunction += 1;
  CHECK(answer(other, devices) != base);
  devices[1].pciBus = 8;
  CHECK(answer(question, devices) != base);
  devices.pop_back();
  CHECK(answer(question, devices) != base);
}

TEST_CASE("selftest: the first two forms are constants") {
  const Question zero{13000, 13000, 1, 1, 1, 1, 1, 1}, one{13000, 13001, 1, 1, 1, 1, 1, 1};
  CHECK(hex(answer(zero, {})) == "5c67cb031c184133e8d14c1faa83d38e");
  CHECK(hex(answer(one, {})) == "5c67cb031c184118e8d14c1faa83d38e");
}
