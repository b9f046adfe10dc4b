// Checks that stop the program with the place and the values. Used by every C++ test, also from
// several threads.
#pragma once

#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>

namespace zerocore::test {

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::ostringstream message;
  message << file << ":" << line << ": " << what << "\n";
  std::cerr << message.str() << std::flush;
  std::_Exit(1);
}

template <class A, class B>
void check_equal(const A& actual, const B& expected, const char* text, const char* file, int line) {
  if (!(actual == expected)) {
    std::ostringstream message;
    message.precision(17);
    message << text << ": expected " << expected << ", got " << actual;
    fail(file, line, message.str());
  }
}

// Runs `function`, which must throw an Exception whose text contains `part`.
template <class Exception, class Function>
void check_throws(const Function& function, const std::string& part, const char* file, int line) {
  try {
    function();
  } catch (const Exception& error) {
    if (std::string(error.what()).find(part) == std::string::npos) {
      fail(file, line, "expected an error with '" + part + "', got '" + error.what() + "'");
    }
    return;
  }
  fail(file, line, "expected an error with '" + part + "', got none");
}

}  // namespace zerocore::test

#define CHECK(condition) \
  ((condition) ? void() : zerocore::test::fail(__FILE__, __LINE__, "expected " #condition))
#define CHECK_EQ(actual, expected) \
  zerocore::test::check_equal(actual, expected, #actual, __FILE__, __LINE__)
#define CHECK_THROWS(Exception, part, ...) \
  zerocore::test::check_throws<Exception>([&] { __VA_ARGS__; }, part, __FILE__, __LINE__)
