# Where each dependency comes from, and the flags every target of ours compiles with.
find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)

# The toolkit's headers: an installed toolkit, or the private folder that ./quickstart fills from PyPI.
find_path(CUDA_INCLUDE cuda.h
  HINTS ${CMAKE_SOURCE_DIR}/.cache/cuda/include $ENV{CUDA_HOME}/include /usr/local/cuda/include REQUIRED)
find_program(NVCC nvcc
  HINTS ${CMAKE_SOURCE_DIR}/.cache/cuda/bin $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
add_library(cuda_headers INTERFACE)
target_include_directories(cuda_headers SYSTEM INTERFACE ${CUDA_INCLUDE})

# NVML's header: of a toolkit that has it, or what scripts/dependencies.sh brings from PyPI.
find_path(NVML_INCLUDE nvml.h HINTS ${CUDA_INCLUDE} ${CMAKE_SOURCE_DIR}/.cache/nvml REQUIRED)
add_library(nvml_header INTERFACE)
target_include_directories(nvml_header SYSTEM INTERFACE ${NVML_INCLUDE})

# KJ and Cap'n Proto, yaml-cpp and SQLite are linked statically, so that one build runs on any node.
find_program(CAPNP capnp REQUIRED)
find_program(CAPNPC_CXX capnpc-c++ REQUIRED)
add_library(capnp_static INTERFACE)
target_link_libraries(capnp_static INTERFACE
  -l:libcapnp-rpc.a -l:libcapnp.a -l:libkj-async.a -l:libkj.a Threads::Threads)
add_library(yaml_static INTERFACE)
target_link_libraries(yaml_static INTERFACE -l:libyaml-cpp.a)

# Writes seccomp filters (server/walls/): what the kernel takes is a program for a small machine, of numbers that differ
# between processors.
add_library(seccomp_static INTERFACE)
target_link_libraries(seccomp_static INTERFACE -l:libseccomp.a)

# Every target of ours links gpupool_flags: warnings are errors, libstdc++ goes inside.
# gcc 12's -Wrestrict takes "text" + std::string for an overlap (its bug 105329).
add_library(gpupool_flags INTERFACE)
target_compile_options(gpupool_flags INTERFACE -Wall -Wextra -Werror -Wno-missing-field-initializers
  -fvisibility=hidden -fno-omit-frame-pointer $<$<CONFIG:Release>:-Wno-restrict>)
target_link_libraries(gpupool_flags INTERFACE Threads::Threads ${CMAKE_DL_LIBS})
if(GPUPOOL_FUZZ)
  # clang's; gcc has the say about warnings. Enumerations are C's, whose values are any of the type's; KJ's classes are not instrumented, so nothing
  # can be said of their tables. The C++ library inside, so that the fuzzers run elsewhere.
  target_compile_options(gpupool_flags INTERFACE -fsanitize=${GPUPOOL_SANITIZE} -fno-sanitize-recover=all
    -fno-sanitize=enum,vptr,function -w)
  target_link_options(gpupool_flags INTERFACE -fsanitize=${GPUPOOL_SANITIZE} -static-libstdc++ -static-libgcc)
elseif(GPUPOOL_SANITIZE)
  # The release build has the say about warnings: gcc takes kj::Maybe's empty state for uninitialised once its accesses are
  # instrumented.
  target_compile_options(gpupool_flags INTERFACE -fsanitize=${GPUPOOL_SANITIZE} -fno-sanitize-recover=all -w)
  if(GPUPOOL_SANITIZE_QUICKLY)
    target_compile_options(gpupool_flags INTERFACE -fno-sanitize=null,alignment)
  endif()
  if(GPUPOOL_SANITIZE MATCHES "address.*undefined")
    # What UBSan finds traps, and AddressSanitizer tells where: gcc's libubsan beside libasan has a log of its own, which
    # ignores log_path.
    target_compile_options(gpupool_flags INTERFACE -fsanitize-undefined-trap-on-error)
  endif()
  target_link_options(gpupool_flags INTERFACE -fsanitize=${GPUPOOL_SANITIZE})
  find_program(GOLD ld.gold)
  mark_as_advanced(GOLD)
  if(GOLD) # in half the time, for a hundred programs
    target_link_options(gpupool_flags INTERFACE -fuse-ld=gold)
  endif()
else()
  target_link_options(gpupool_flags INTERFACE -static-libstdc++ -static-libgcc)
endif()

# ./check, ./quickstart and the sanitizer builds compile several files of a library at once (CMAKE_UNITY_BUILD), in two
# thirds of the time, with eight to a piece in each build, so that what clashes does so in all. These go alone:
# names of their own would meet the same names of others there, or a test links the library without them.
function(gpupool_apart)
  set_source_files_properties(${ARGN} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()

# gpupool_test(NAME LABEL sources... LIBS libs...): one Catch2 executable, one CTest entry with that label and a
# time limit. tests/main.cpp and tests/catch.h hide the difference between Catch2 2 (Debian 12) and 3.
find_package(Catch2 REQUIRED)
# What is compiled takes longer than what it does; with AddressSanitizer still more. Not so with ThreadSanitizer: a loop
# over bytes takes five times as long.
set(test_optimization -O1)
if(GPUPOOL_SANITIZE AND NOT GPUPOOL_SANITIZE MATCHES thread)
  set(test_optimization -O0)
endif()
set(gpupool_left_out)
if(GPUPOOL_SANITIZE STREQUAL "thread" AND GPUPOOL_SANITIZE_QUICKLY)
  file(STRINGS ${CMAKE_SOURCE_DIR}/tests/sanitizers/one_thread.txt gpupool_left_out REGEX "^[^#]")
endif()
function(gpupool_test name label)
  cmake_parse_arguments(ARG "" "TIMEOUT" "LIBS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  if(GPUPOOL_SANITIZE)
    math(EXPR ARG_TIMEOUT "4 * ${ARG_TIMEOUT}")
  endif()
  add_executable(${name} ${ARG_UNPARSED_ARGUMENTS})
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/tests/support)
  target_link_libraries(${name} PRIVATE gpupool_flags catch_main ${ARG_LIBS})
  target_compile_options(${name} PRIVATE ${test_optimization})
  target_precompile_headers(${name} REUSE_FROM catch_headers)
  add_test(NAME ${name} COMMAND ${name})
  if(name IN_LIST gpupool_left_out)
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
    set(label left_out)
  endif()
  set_tests_properties(${name} PROPERTIES LABELS ${label} TIMEOUT ${ARG_TIMEOUT})
endfunction()
mark_as_advanced(CUDA_INCLUDE NVML_INCLUDE NVCC CCACHE CAPNP CAPNPC_CXX)

if(NOT TARGET catch_main)
  add_library(catch_main STATIC ${CMAKE_SOURCE_DIR}/tests/support/catch_main.cpp)
  # With a sanitizer's flags, too: of what several objects have inline, its copy is linked.
  target_link_libraries(catch_main PRIVATE gpupool_flags)
  if(TARGET Catch2::Catch2WithMain)  # Catch2 3
    target_link_libraries(catch_main PUBLIC Catch2::Catch2WithMain)
  else()
    target_link_libraries(catch_main PUBLIC Catch2::Catch2)
  endif()
  # gcc 12 sees accesses beyond a string's small buffer where its header is precompiled.
  target_compile_options(catch_main INTERFACE -Wno-array-bounds -Wno-stringop-overflow -Wno-stringop-overread)
  target_compile_options(catch_main PRIVATE -O0)  # half a minute less, and no test is slower for it
  # Catch2 takes a third of a test's compilation: once for all of them, with their flags (an executable's).
  add_executable(catch_headers EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/tests/support/catch_headers.cpp)
  target_link_libraries(catch_headers PRIVATE gpupool_flags catch_main)
  target_compile_options(catch_headers PRIVATE ${test_optimization})
  target_precompile_headers(catch_headers PRIVATE ${CMAKE_SOURCE_DIR}/tests/support/catch.h)
endif()
