#include "client/errors.h"

#include <fstream>
#include <sstream>
#include <string>

#include "catch.h"

using namespace gpupool::client;

TEST_CASE("errors: names and texts") {
  const char* text = nullptr;
  CHECK(errorName(CUDA_SUCCESS, &text) == CUDA_SUCCESS);
  CHECK(std::string(text) == "CUDA_SUCCESS");
  CHECK(errorString(CUDA_SUCCESS, &text) == CUDA_SUCCESS);
  CHECK(std::string(text) == "no error");
  CHECK(errorString(CUDA_ERROR_OUT_OF_MEMORY, &text) == CUDA_SUCCESS);
  CHECK(std::string(text) == "out of memory");
  CHECK(errorString(CUDA_ERROR_INVALID_VALUE, &text) == CUDA_SUCCESS);
  CHECK(std::string(text) == "invalid argument");
  CHECK(errorNameOr(CUDA_ERROR_NOT_FOUND) == std::string("CUDA_ERROR_NOT_FOUND"));
  CHECK(errorNameOr(static_cast<CUresult>(1001)) == std::string("unknown error code"));
}

TEST_CASE("errors: what is none") {
  for (int code : {9, 599, 1000, 1023}) {
    const char* text = "untouched";
    CHECK(errorName(static_cast<CUresult>(code), &text) == CUDA_ERROR_INVALID_VALUE);
    CHECK(text == nullptr);
    text = "untouched";
    CHECK(errorString(static_cast<CUresult>(code), &text) == CUDA_ERROR_INVALID_VALUE);
    CHECK(text == nullptr);
  }
  CHECK(errorName(CUDA_SUCCESS, nullptr) == CUDA_ERROR_INVALID_VALUE);
  CHECK(errorString(CUDA_SUCCESS, nullptr) == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("errors: every code of cuda.h has both") {
  std::ifstream header(GPUPOOL_CUDA_INCLUDE "/cuda.h");
  REQUIRE(header);
  const std::string text(std::istreambuf_iterator<char>(header), {});
  const size_t begin = text.find("typedef enum cudaError_enum");
  const size_t end = text.find("} CUresult", begin);
  REQUIRE(end != std::string::npos);
  const std::string body = text.substr(begin, end - begin);
  // Lines of the form "    CUDA_NAME   = 123,".
  std::istringstream lines(body);
  int count = 0;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string word, equals;
    int number = 0;
    if (!(words >> word >> equals >> number) || !word.starts_with("CUDA_") || equals != "=") continue;
    const char* name = nullptr;
    const char* meaning = nullptr;
    const auto code = static_cast<CUresult>(number);
    INFO(word);
    CHECK(errorName(code, &name) == CUDA_SUCCESS);
    CHECK(name == word);
    CHECK(errorString(code, &meaning) == CUDA_SUCCESS);
    CHECK(std::string(meaning).size() > 3);
    ++count;
  }
  CHECK(count > 90);
}
