# A CMake toolchain: zig's clang, libc++ and glibc headers. packaging/wheels.py sets the three variables and makes the
# commands in NETFOLD_ZIG_BIN. libc++ is linked statically, so that a wheel needs nothing of the host but glibc.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR $ENV{NETFOLD_ZIG_PROCESSOR})
foreach(tool AR RANLIB)
  string(TOLOWER ${tool} command)
  set(CMAKE_${tool} $ENV{NETFOLD_ZIG_BIN}/${command})
endforeach()
set(CMAKE_CXX_COMPILER $ENV{NETFOLD_ZIG_BIN}/c++)
# nanobind 3.1 names stderr without <cstdio>, which libstdc++ includes by itself and libc++ does not.
set(CMAKE_CXX_FLAGS_INIT "-include cstdio")
# -s: without the symbol table and debug information.
set(CMAKE_MODULE_LINKER_FLAGS_INIT "-s")
set(CMAKE_SHARED_LINKER_FLAGS_INIT "-s")
