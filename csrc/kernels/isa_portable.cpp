// The inner loops in plain C++, for any processor.

#include "lanes_portable.h"
#include "loops.h"

#define ZEROCORE_LANES portable
#include "loops_table.h"
