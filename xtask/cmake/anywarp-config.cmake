# find_package(anywarp CONFIG) provides three libraries to link with:
#   anywarp::anywarpdv  <infiniband/anywarpdv.h>: verbs with one-sided operations and reliable datagrams of anywarp
#   anywarp::exs        <exs.h>: extended sockets
#   anywarp::buffers    <anywarp-buffers.h>: buffers for RDMA: copied, registered for one use, or registered and cached
get_filename_component(_anywarp_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." REALPATH)

if(NOT TARGET anywarp::anywarpdv)
  add_library(anywarp::anywarpdv SHARED IMPORTED)
  set_target_properties(anywarp::anywarpdv PROPERTIES
    IMPORTED_LOCATION "${_anywarp_prefix}/lib/anywarp/libibverbs.so.1"
    IMPORTED_SONAME "libibverbs.so.1"
    INTERFACE_INCLUDE_DIRECTORIES "${_anywarp_prefix}/include")
endif()

if(NOT TARGET anywarp::exs)
  add_library(anywarp::exs SHARED IMPORTED)
  set_target_properties(anywarp::exs PROPERTIES
    IMPORTED_LOCATION "${_anywarp_prefix}/lib/libexs.so.1"
    IMPORTED_SONAME "libexs.so.1"
    INTERFACE_INCLUDE_DIRECTORIES "${_anywarp_prefix}/include")
endif()

if(NOT TARGET anywarp::buffers)
  add_library(anywarp::buffers SHARED IMPORTED)
  set_target_properties(anywarp::buffers PROPERTIES
    IMPORTED_LOCATION "${_anywarp_prefix}/lib/libanywarp-buffers.so.1"
    IMPORTED_SONAME "libanywarp-buffers.so.1"
    INTERFACE_INCLUDE_DIRECTORIES "${_anywarp_prefix}/include")
endif()

unset(_anywarp_prefix)
