# Every kernel in the output of cuobjdump -sass must move 16 bytes at a time.
function check() {
  if (kernel == "") return
  kernels++
  least_loads = kernel ~ /adamw_kernel/ ? 6 : kernel ~ /sumsq_kernel/ ? 4 : kernel ~ /pack_kernel/ ? 2 : 1
  least_stores = kernel ~ /adamw_kernel/ ? 6 : kernel ~ /pack_kernel/ ? 2 : 0
  # sum_shards: all loads of a batch, or the store of a wider out.
  enough = loads >= least_loads && stores >= least_stores && (kernel !~ /10sum_kernel/ || loads >= 4 || stores >= 1)
  if (!enough) {
    printf "%s (%s): expected at least %d loads and %d stores of 16 bytes, got %d and %d\n",
      kernel, architecture, least_loads, least_stores, loads, stores
    failed = 1
  }
}
/^[ \t]*arch = / || /EIATTR|code for sm_/ { check(); kernel = ""; architecture = $NF }
/Function : / { check(); kernel = $NF; loads = stores = 0 }
/[ \t]LDG\.E\.([A-Z]+\.)*128/ { loads++ }
/[ \t]STG\.E\.([A-Z]+\.)*128/ { stores++ }
END {
  check()
  if (kernels == 0) { print "expected kernels, got none"; failed = 1 }
  printf "kernels checked: %d\n", kernels
  exit failed
}
