# cut.awk: makes starter.c of solution.c: awk -f cut.awk solution.c >starter.c
# A region begins with the line /* >> name */ and ends with /* << text */. The text, which may be empty, takes the place
# of the region.
/^ *\/\* >> .* \*\/$/ { inside = 1; next }
/^ *\/\* << (.* )?\*\/$/ { inside = 0; if (/<< \*\/$/) next; sub(/\/\* << /, ""); sub(/ \*\/$/, "") }
!inside
